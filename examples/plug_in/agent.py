"""An agent of your own: an async function, or a class whose options are `agent.options`.

[agent]
name = "examples.plug_in.agent:answer"
"""

from raggedright.agents import Session, Task


async def answer(task: Task, session: Session) -> float:
    """Ask once; the score is the share of the reply's characters that are the answer."""
    trajectory = session.trajectory(str(task.data["question"]))
    reply = await trajectory.generate(max_tokens=4)
    return reply.text.count(str(task.data["answer"])) / 4
