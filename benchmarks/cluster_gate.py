"""An agent that compacts its context, in rounds that are let through one block at a time.

The file `until` in the run folder has the number of the last round that may run; sessions of later ones wait. So
several runs, whoever launches them, are started once and take turns on a machine that is as busy for one as for the
others. Of a rank's waiting sessions one looks at the file, now and then, and the others cost nothing. The first round
of a block has the waiting in it, and does not count.
"""

import asyncio
from pathlib import Path

from raggedright.agents.compaction import compact
from raggedright.agents.session import Session, Task

LOOK_SECONDS = 0.2


class Gated:
    """Compacts, once its round may run."""

    def __init__(self, folder: str) -> None:
        self._file, self._until = Path(folder) / "until", 0
        self._round, self._one_looks = 0, asyncio.Lock()

    async def __call__(self, task: Task, session: Session) -> float:
        """Wait, then play."""
        if session.key.round > self._round:  # a round has an event loop of its own, and so has a lock
            self._round, self._one_looks = session.key.round, asyncio.Lock()
        if session.key.round > self._until:
            async with self._one_looks:
                while session.key.round > self._until:
                    self._until = int(self._file.read_text() or 0) if self._file.exists() else 0
                    if session.key.round > self._until:
                        await asyncio.sleep(LOOK_SECONDS)
        return await compact(task, session)
