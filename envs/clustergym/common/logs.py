"""Logging of servers: one record is one line."""

from __future__ import annotations

import logging
import re

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
# Line ends of any kind and other control characters, which could forge log lines or drive a terminal.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def one_line(text: str) -> str:
    r"""The text with control characters escaped.

    >>> one_line("a\nb")
    'a\\nb'
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class OneLineFormatter(logging.Formatter):
    """Formats a record, with its traceback if it has one, as one line. No text of a request can start a new line."""

    def format(self, record: logging.LogRecord) -> str:
        return one_line(super().format(record))


def configure_logging(level: int = logging.INFO) -> None:
    """Log to standard error, one line per record."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLineFormatter(LOG_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
