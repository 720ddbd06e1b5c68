"""What a user's module may hold: tasks, agents and rewards, found by their names."""

NUMBER = 3


def doubled(index: int, seed: int) -> dict[str, object]:
    return {"question": [index, {"seed": seed}]}


def wrong(index: int, seed: int) -> list[int]:
    return [index]


def exact(task, text: str) -> float:
    return float(text == task.data["answer"])


async def later(task, text: str) -> float:
    return exact(task, text)


async def plain_agent(task, session):
    return 1.0


def not_async(task, session):
    return 1.0


class Player:
    def __init__(self, tries: int, *, hints: bool = False) -> None:
        self.tries, self.hints = tries, hints

    async def __call__(self, task, session):
        return 1.0


class NotAsync:
    def __call__(self, task, session):
        return 1.0
