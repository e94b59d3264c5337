"""What can go wrong outside of a run: the directory, the program, the evidence."""


class BenchError(Exception):
    """A benchmark cannot go on. ``message`` names the file or flag and says what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
