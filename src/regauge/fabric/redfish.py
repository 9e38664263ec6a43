"""Asks board controllers by Redfish. Needs the extra `redfish` (sushy)."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

import sushy
from requests import PreparedRequest, Response
from requests import exceptions as wrong
from requests.adapters import HTTPAdapter
from sushy import auth, connector, exceptions
from urllib3.exceptions import HTTPError

from regauge.fabric.bmc import WHY, Access, judge
from regauge.fabric.finding import Finding, told

PATIENCE_S: Final = 5
ALL_S: Final = 30.0
"""All that a BMC is asked."""
MOST_BYTES: Final = 1 << 20
"""Of one answer; a system with its members is some 10 KB."""

logging.getLogger("sushy").setLevel(logging.CRITICAL)  # what it logs is in the findings


def check(url: str, access: Access) -> Iterator[Finding]:
    """Yield what is wrong with a BMC and its server: it does not answer, or what `bmc.judge` finds."""
    host = url.partition("://")[2].partition("/")[0].rpartition(":")[0] or url.partition("://")[2]
    try:
        root = _open(url, access)
        systems = [each.json for each in root.get_system_collection().get_members()]
        managers = [each.json for each in root.get_manager_collection().get_members()]
        found = list(judge(url, systems, managers))
    except exceptions.AccessError:
        yield told("bmc", "management", url, "refuses user and password", WHY, "name a user of the BMC in the file of --bmc; ipmitool user list 1, on the server")  # fmt: skip
    except exceptions.ConnectionError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            yield told("bmc", "management", url, "has a certificate that is signed by nobody known, or is another's", WHY, "name the PEM file of who signed it as authority in the file of --bmc")  # fmt: skip
        else:
            yield told("bmc", "management", url, f"does not answer by Redfish: {_plain(error)}", WHY, f"ping {host}; look at its cable and VLAN; ipmitool lan print 1, on the server")  # fmt: skip
    except (exceptions.SushyError, ValueError, TypeError, AttributeError) as error:  # sushy meets what is no Redfish
        yield told("bmc", "management", url, f"does not answer as Redfish says: {_plain(error)}", WHY, f"look whether it is the BMC's address, and Redfish on: curl -k {url}/redfish/v1/")  # fmt: skip
    else:
        yield from found


class _Guard(HTTPAdapter):
    """Sends to one host only, until a deadline, and takes so many bytes: a BMC's links and redirects are a stranger's."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._to = urlsplit(url)[:2]
        self._deadline = time.monotonic() + ALL_S

    def send(
        self, request: PreparedRequest, stream: bool = False, timeout: float | tuple[float | None, float | None] | None = None,  # noqa: ARG002  # all is streamed
        verify: bool | str = True, cert: str | tuple[str, str] | None = None, proxies: dict[str, str] | None = None,
    ) -> Response:  # fmt: skip
        """Send a request and read its answer whole."""
        if urlsplit(request.url or "")[:2] != self._to:
            raise wrong.InvalidURL("it points to another host, which is not asked")
        self._in_time()
        response = super().send(request, True, timeout, verify, cert, proxies)
        read, body = response.raw, bytearray()
        try:
            while piece := read.read1(1 << 16, decode_content=True):
                self._in_time()
                body += piece
                if len(body) > MOST_BYTES:
                    raise wrong.ContentDecodingError(f"an answer is larger than {MOST_BYTES} bytes")
        except HTTPError as error:
            raise wrong.ContentDecodingError(f"an answer broke off: {error}") from error
        finally:
            response.close()
        response.raw = io.BytesIO(body)
        return response

    def _in_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise wrong.RetryError(f"its answers took more than {ALL_S:g} s")


def _open(url: str, access: Access) -> sushy.Sushy:
    verify: bool | str = access.verify and (access.authority or True)
    wire = connector.Connector(
        url, verify=verify, default_request_timeout=PATIENCE_S, connect_timeout=PATIENCE_S, server_side_retries=1
    )  # fmt: skip
    for scheme in ("https://", "http://"):
        wire._session.mount(scheme, _Guard(url))  # as sushy mounts its own for TLS settings
    wire._session.trust_env = False  # no proxy, no .netrc
    login = auth.BasicAuth(username=access.user, password=access.password)
    return sushy.Sushy(url, connector=wire, auth=login)


def _plain(said: object) -> str:
    """What a stranger says goes to a terminal: one line, no control characters."""
    return "".join(each if each.isprintable() else " " for each in str(said))[:200]
