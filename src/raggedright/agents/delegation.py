"""Delegation: a main agent keeps the first chunk of digits and gives the others to sub-agents, all at once.

Each sub-agent has a trajectory of its own, sees its chunk only, and reports one digit, the largest of it. The main
agent answers from its own chunk and the reports. A malformed report ends the session.

Their trajectories are opened before any of them runs: a trajectory's number names its randomness, so the order in which
they are opened must not depend on which of them is quicker.
"""

import asyncio

from raggedright.agents.digits import REPLY_TOKENS, cut, digit_of, digits_of, score
from raggedright.agents.session import Session, Task


async def delegate(task: Task, session: Session) -> float:
    """One trajectory a sub-agent, all at once, then one of the main agent."""
    digits = digits_of(task)
    own, *others = cut(digits, session.random, max_chunks=3)
    sub_agents = [session.trajectory(f"-:{''.join(chunk)}=", role="sub-agent") for chunk in others]
    replies = await asyncio.gather(*(sub.generate(max_tokens=REPLY_TOKENS) for sub in sub_agents))
    reports = [digit_of(reply) for reply in replies]
    if None in reports:
        return score(session, None, digits)
    main = session.trajectory(f"{''.join(map(str, reports)) or '-'}:{''.join(own)}=", role="main")
    answer = digit_of(await main.generate(max_tokens=REPLY_TOKENS))
    return score(session, answer, digits)
