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


def ask_again(task, messages) -> str:
    return "No, try again."


def ask_once(task, messages) -> str | None:
    return "No, try again." if len(messages) == 2 else None


async def ask_later(task, messages) -> str | None:
    return ask_once(task, messages)


def never(task, messages) -> None:
    return None


def told_so_far(task, messages) -> str:
    return "next" if len(messages) == 2 else "|".join(f"{each['role']}:{each['content']}" for each in messages)


def wrong_step(task, messages) -> int:
    return 3


def failing_step(task, messages) -> str:
    return str(1 / 0)
