"""What an agent imports: its task and session, and the types of what they take and return; needs torch."""

from raggedright.agents.agent_session import Agent, Session, Task
from raggedright.agents.tokens import Message, Tokens
from raggedright.agents.trajectory import Reply, Trajectory
from raggedright.agents.vision import Picture
from raggedright.sessions import SessionError

__all__ = ["Agent", "Message", "Picture", "Reply", "Session", "SessionError", "Task", "Tokens", "Trajectory"]
