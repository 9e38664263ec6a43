"""The doctor's checks of the host itself, and of what regauge is told to use of it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from regauge.fabric.expected import Expected
from regauge.fabric.finding import Finding
from regauge.fabric.host import Host, decoded, number

SKEW_S = 0.1
"""Of a clock: registration allows 60 s, but time lines of several hosts are put together."""


def memlock(host: Host, expected: Expected) -> Iterator[Finding]:
    """Memory can be pinned without limit."""
    if not expected.rdma:
        return
    found = re.search(r"^Max locked memory\s+(\S+)", host.read("/proc/self/limits") or "", re.MULTILINE)
    if found is not None and found[1] != "unlimited":
        yield Finding(
            "memlock", "host", "RLIMIT_MEMLOCK", f"{int(found[1]) >> 10} KiB may be locked, and RDMA pins the whole pool", "Registering the pool fails.",
            "LimitMEMLOCK=infinity in the unit; `* - memlock unlimited` in /etc/security/limits.conf",
        )  # fmt: skip


def hugepages(host: Host, expected: Expected) -> Iterator[Finding]:
    """Large pages are to be had for the pool and its staging."""
    found = host.read("/sys/kernel/mm/transparent_hugepage/enabled")
    total = re.search(r"^HugePages_Total:\s+(\d+)", host.read("/proc/meminfo") or "", re.MULTILINE)
    if expected.rdma and found is not None and "[never]" in found and (total is None or total[1] == "0"):
        yield Finding(
            "hugepages", "host", "/sys/kernel/mm/transparent_hugepage/enabled", "there are no large pages",
            "Registering 100 GB of pages of 4 KiB takes minutes.", "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled", "warning",
        )  # fmt: skip


def clock(host: Host, expected: Expected) -> Iterator[Finding]:  # noqa: ARG001  # every check has both
    """The clock is held by a time server (chronyc(1), timedatectl(1))."""
    tracking = host.run("chronyc", "-c", "tracking")
    if tracking is not None:
        fields = tracking.split(",")
        offset = float(fields[4]) if len(fields) > 4 and re.fullmatch(r"-?[\d.e+-]+", fields[4]) else 0.0
        if len(fields) > 13 and fields[13] == "Not synchronised":
            yield _clock("the clock follows no time server", "chronyc makestep; chronyc sources")
        elif abs(offset) > SKEW_S:
            yield _clock(f"the clock is {abs(offset):.3f} s off its time server's", "chronyc makestep")
        return
    said = host.run("timedatectl", "show", "--property=NTPSynchronized", "--value")
    if said == "no":
        yield _clock("the clock follows no time server", "timedatectl set-ntp true")
    elif said is None:
        yield Finding(
            "clock", "host", "clock", "neither chronyc nor timedatectl says whether the clock is right", "It was not looked at.", "apt-get install chrony", "unknown",
        )  # fmt: skip


def _clock(what: str, mend: str) -> Finding:
    why = "Workers that are 60 s off cannot register, receipts get wrong times, and time lines of several hosts do not fit together."
    return Finding("clock", "host", "clock", what, why, mend)


def firewall(host: Host, expected: Expected) -> Iterator[Finding]:
    """The rules that keep the transports' ports on the compute plane are loaded."""
    if expected.guessed:
        return
    said = decoded(host.run("nft", "-j", "list", "tables"))
    if not isinstance(said, dict) or not isinstance(said.get("nftables"), list):
        yield Finding(
            "firewall", "compute", "nftables", "nft does not say which rules there are", "It was not looked at.", "as root; apt-get install nftables", "unknown",
        )  # fmt: skip
    elif not any(
        isinstance(each, dict) and isinstance(t := each.get("table"), dict) and t.get("name") == "regauge"
        for each in said["nftables"]
    ):
        yield Finding(
            "firewall", "compute", "nftables", "there is no table regauge", "The transports' ports can be reached from every plane.",
            f"nft -f hosts/{expected.name}/nftables/regauge.nft, as `regauge topology render` writes it", "warning",
        )  # fmt: skip


def idle(host: Host, expected: Expected) -> Iterator[Finding]:  # noqa: ARG001
    """Every compute NIC is used by the configuration."""
    config = expected.config
    ports = expected.on("compute")
    if config is None or len(ports) < 2:
        return
    transfer = config.transfer
    if transfer.transport in ("mooncake", "nixl"):
        devices = transfer.mooncake.devices if transfer.transport == "mooncake" else transfer.nixl.devices
        used = {each.partition(":")[0] for each in devices}
        left, setting = [p for p in ports if not {p.rdma, p.interface} & used], f"transfer.{transfer.transport}.devices"
    elif transfer.transport == "tcp":
        given = {each.partition("%")[0] for each in (transfer.nics or [transfer.host])}
        left, setting = [p for p in ports if not {p.interface, str(p.address), str(p.network)} & given], "transfer.nics"
    else:
        return
    if left and (len(left) < len(ports) or transfer.transport == "tcp"):
        names = ", ".join(each.interface for each in left)
        yield Finding(
            "idle", "compute", setting, f"{len(left)} of {len(ports)} compute NICs are not used: {names}",
            "As much of the network stands idle; engines have run with half of their NICs for it (kvcache-ai/Mooncake#429, vllm-project/vllm#43799).",
            f"list all of them in {setting}", "warning",
        )  # fmt: skip


def devices(host: Host, expected: Expected) -> Iterator[Finding]:  # noqa: ARG001
    """The transport's devices are named, and are the compute plane's."""
    config = expected.config
    if config is None or config.transfer.transport not in ("mooncake", "nixl"):
        return
    transfer = config.transfer
    own = {port.interface for port in expected.on("compute")} | {
        port.rdma for port in expected.on("compute") if port.rdma
    }
    given = transfer.nixl.devices if transfer.transport == "nixl" else transfer.mooncake.devices
    setting = f"transfer.{transfer.transport}.devices"
    if not given and (transfer.transport == "nixl" or transfer.mooncake.protocol == "rdma"):
        yield Finding(
            "devices", "compute", setting, "no device is named", "The library takes every interface that it finds: of NIXL's bytes half took another plane by default.",
            f"{setting} = {_listed(expected)}",
        )  # fmt: skip
    for each in given:
        if own and each.partition(":")[0] not in own:
            yield Finding(
                "devices", "compute", setting, f"{each!r} is not of the compute plane", "KV takes another plane.", f"{setting} = {_listed(expected)}",
            )  # fmt: skip


def _listed(expected: Expected) -> str:
    names = [f'"{port.rdma}:1"' if port.rdma else f'"{port.interface}"' for port in expected.on("compute")]
    return f"[{', '.join(names)}]"


def line_rate(host: Host, expected: Expected) -> Iterator[Finding]:
    """What flow control takes a NIC to give is no more than it can."""
    config = expected.config
    if config is None or config.transfer.transport == "shm":
        return
    told = config.transfer.flow.nic_bytes_per_s
    for port in expected.on("compute"):
        found = number(host.read(f"/sys/class/net/{port.interface}/speed"))
        if found is not None and 0 < found * 125_000 < 0.99 * told:
            yield Finding(
                "line-rate", "compute", "transfer.flow.nic_bytes_per_s", f"{told:.3g} bytes/s, and {port.interface} gives {found * 125_000:.3g}",
                "Predictions and loads are of a NIC that is not there; elsewhere speeds above the line rate were shown for it (sgl-project/sglang#31877).",
                f"transfer.flow.nic_bytes_per_s = {found * 125_000:.3g}", "warning",
            )  # fmt: skip
            return
