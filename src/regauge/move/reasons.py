"""Why transfers fail, in few classes: the labels of the failure counter. `docs/operations.md` says what to do about each."""

from __future__ import annotations

import re

from regauge.errors import AuthError, ProtocolError, Refused, TransferFailed, TransportError
from regauge.move.channel import REFUSAL
from regauge.observe import OTHER

_CLASSES = (
    ("flow", r"^flow control does not take it: "),
    ("link", r"^(lost (the link|prefill worker)|no new link from |the link to .* was closed)"),
    ("refused", r"^no new link to |^no link from |together do not send "),
    ("restarted", r"has been restarted$"),
    ("corrupted", r"arrived corrupted twice$"),
    ("lease", r"^no sign of life from "),
    ("deadline", r"(in time|after the request's time)$"),
    ("peer", r"gave the transfer up$"),
    ("fault", r"^a chunk could not be "),
    ("mismatch", r"offers \d+ tokens, the request has \d+$"),
    ("aborted", r"^the request was aborted|^the prefill worker is closing"),
)
"""Label and pattern of the reasons that `sender.py`, `receiver.py` and their drivers give, first match first."""


def reason_class(error: BaseException) -> str:
    """Return the class of what ended a transfer, one of `observe.REASONS`; "other" for what is in none."""
    if isinstance(error, Refused | AuthError):
        return "refused"
    if isinstance(error, TransportError):
        return "link"
    if isinstance(error, ProtocolError) and str(error).startswith(REFUSAL):
        return "refused"
    if isinstance(error, TransferFailed):
        text = str(error)
        return next((name for name, pattern in _CLASSES if re.search(pattern, text)), OTHER)
    return OTHER
