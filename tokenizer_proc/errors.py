"""What is wrong with a prompt, in the words that its sender gets to read."""

from __future__ import annotations


class PromptError(Exception):
    """A prompt that cannot be served; the client is told with HTTP status 400.

    `param` names the field at fault (`messages[1].content[0].type`), `code` is a stable word for programs.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
