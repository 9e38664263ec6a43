"""Asks board controllers by Redfish. Needs the extra `redfish` (sushy)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

import sushy
from sushy import auth, connector, exceptions

from regauge.fabric.bmc import WHY, Access, judge
from regauge.fabric.finding import Finding, told

PATIENCE_S: Final = 5

logging.getLogger("sushy").setLevel(logging.CRITICAL)  # what it logs is in the findings


def check(url: str, access: Access) -> Iterator[Finding]:
    """Yield what is wrong with a BMC and its server: it does not answer, or what `bmc.judge` finds."""
    host = url.partition("://")[2].partition("/")[0].rpartition(":")[0] or url.partition("://")[2]
    try:
        root = _open(url, access)
        systems = [each.json for each in root.get_system_collection().get_members()]
        managers = [each.json for each in root.get_manager_collection().get_members()]
    except exceptions.AccessError:
        yield told("bmc", "management", url, "refuses user and password", WHY, "name a user of the BMC in the file of --bmc; ipmitool user list 1, on the server")  # fmt: skip
    except exceptions.SushyError as error:
        yield told("bmc", "management", url, f"does not answer by Redfish: {str(error)[:200]}", WHY, f"ping {host}; look at its cable and VLAN; ipmitool lan print 1, on the server")  # fmt: skip
    else:
        yield from judge(url, systems, managers)


def _open(url: str, access: Access) -> sushy.Sushy:
    verify: bool | str = access.verify and (access.authority or True)
    wire = connector.Connector(
        url, verify=verify, default_request_timeout=PATIENCE_S, connect_timeout=PATIENCE_S, server_side_retries=1
    )  # fmt: skip
    login = auth.BasicAuth(username=access.user, password=access.password)
    return sushy.Sushy(url, connector=wire, auth=login)
