NAMES = ("engine", "operator", "model")
def ensure(d: dict[str, str], n: list[str]) -> dict[str, str]: return {}
