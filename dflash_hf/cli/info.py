"""placeholder"""


def info(drafter: str) -> None:
    pass
