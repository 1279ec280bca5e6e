"""placeholder"""


def generate(target: str) -> None:
    pass
