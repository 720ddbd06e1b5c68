"""Context compaction: digits arrive in chunks, and between chunks the agent has one digit of memory.

After each chunk it writes its memory, the largest digit so far, and goes on in a fresh context that holds that memory
and the next chunk. A malformed memory ends the session. The last memory is the answer, and the session's reward goes to
all its trajectories, so the model must learn to remember for a context that it will not see.
"""

from raggedright.agents.digits import REPLY_TOKENS, cut, digit_of, digits_of, score
from raggedright.agents.session import Session, Task


async def compact(task: Task, session: Session) -> float:
    """One trajectory a chunk, one after another."""
    digits = digits_of(task)
    memory: str | None = "-"
    for chunk in cut(digits, session.random, max_chunks=4):
        trajectory = session.trajectory(f"{memory}:{''.join(chunk)}=")
        reply = await trajectory.generate(max_tokens=REPLY_TOKENS)
        memory = digit_of(reply)
        if memory is None:
            break
    return score(session, memory, digits)
