"""Keys of services: read from the environment, shown nowhere."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from opensearch_lightning.errors import ConfigurationError

SHORTEST = 8
"""Characters of a key: a shorter one could be a word of any text, from which it would be taken out."""
_NAME = re.compile(r"[A-Z_][A-Z0-9_]{2,63}")


def keep_out_of_logs(*loggers: str) -> None:
    """Raise loggers of client libraries, which below that write out headers, to WARNING where no level is set."""
    for name in loggers:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.WARNING)


class MissingKeyError(ConfigurationError):
    """The environment holds no key for a service."""


class Secret:
    """A key that no repr, pickle or log shows; :meth:`reveal` gives it to the request it is for."""

    __slots__ = ("_value", "variable")

    def __init__(self, variable: str, value: str) -> None:
        self.variable = variable
        self._value = value

    @classmethod
    def from_environment(cls, variable: str) -> Secret:
        """The value of an environment variable.

        Args:
            variable: its name, in capitals.

        Raises:
            ConfigurationError: ``variable`` is no such name; it is not repeated, for it may be a key.
            MissingKeyError: the variable is not set, or empty.
        """
        if not _NAME.fullmatch(variable):
            raise ConfigurationError(
                "The name of an environment variable that holds a key is written in capitals, such as SERPER_API_KEY: "
                "export the key under one, and set that name; keys themselves never belong into a configuration."
            )
        value = os.environ.get(variable, "").strip()
        if not value:
            raise MissingKeyError(f"The environment variable {variable} is not set: export {variable}=… with the key.")
        if len(value) < SHORTEST:
            raise ConfigurationError(
                f"The key in {variable} has less than {SHORTEST} characters: for a server without keys, leave out the "
                "name of the variable."
            )
        if not value.isascii() or not value.isprintable():
            raise ConfigurationError(f"The key in {variable} holds characters that no key has: export it anew.")
        return cls(variable, value)

    def reveal(self) -> str:
        """The key itself."""
        return self._value

    def redact(self, value: Any) -> Any:
        """A text, or parsed JSON, without the key, should a server have sent it back."""
        if isinstance(value, str):
            return value.replace(self._value, "***")
        if isinstance(value, list):
            return [self.redact(item) for item in value]
        if isinstance(value, dict):
            return {self.redact(name): self.redact(item) for name, item in value.items()}
        return value

    def __repr__(self) -> str:
        return f"Secret({self.variable})"

    def __reduce__(self) -> tuple[object, ...]:
        # A worker process has the same environment; its pickle needs no key.
        return Secret.from_environment, (self.variable,)
