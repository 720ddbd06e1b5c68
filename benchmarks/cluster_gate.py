"""An agent that compacts its context, in rounds that are released one block at a time.

The file `until` in the run folder has the number of the last round that may run; sessions of later rounds wait. So
several runs, with any launcher, are started once and take turns, and other load on the machine affects all of them. One
of the waiting sessions of a rank reads the file from time to time, so the others cost nothing. The first round of a
block includes the waiting time and does not count.
"""

import asyncio
from pathlib import Path

from raggedright.agents.agent_session import Session, Task
from raggedright.agents.digits import compact

LOOK_SECONDS = 0.2


class Gated:
    """Compaction, once its round may run."""

    def __init__(self, folder: str) -> None:
        self._file, self._until = Path(folder) / "until", 0
        self._round, self._one_looks = 0, asyncio.Lock()

    async def __call__(self, task: Task, session: Session) -> float:
        """Wait, then play."""
        if session.key.round > self._round:  # each round has its own event loop, so it needs its own lock
            self._round, self._one_looks = session.key.round, asyncio.Lock()
        if session.key.round > self._until:
            async with self._one_looks:
                while session.key.round > self._until:
                    self._until = int(self._file.read_text() or 0) if self._file.exists() else 0
                    if session.key.round > self._until:
                        await asyncio.sleep(LOOK_SECONDS)
        return await compact(task, session)
