"""regauge's own files: a gateway's and the workers' configuration, and the targets that Prometheus scrapes."""

from __future__ import annotations

import json
from typing import Any

import tomli_w

from regauge.fabric.topology import Server, Topology

NODE_EXPORTER_PORT = 9_100
"""Where Prometheus' node exporter listens if nobody says otherwise."""


def configs(topology: Topology) -> dict[str, str]:
    """Return `worker.toml` for each host that computes, as `regauge worker --role ROLE --config` takes it, and `gateway.toml` for the gateway's (`regauge serve --config`)."""
    found = {f"hosts/{server.name}/regauge/worker.toml": _file(topology, _worker(topology, server))
             for server in topology.of_role("prefill", "decode")}  # fmt: skip
    gateway = topology.server(topology.gateway)
    found[f"hosts/{gateway.name}/regauge/gateway.toml"] = _file(topology, _gateway(topology, gateway))
    return found


def _file(topology: Topology, said: dict[str, Any]) -> str:
    head = f"# Made by `regauge topology render` from {topology.site}: change the bill of materials, not this file.\n"
    return head + tomli_w.dumps(said)


def _common(topology: Topology, server: Server) -> dict[str, Any]:
    serving = topology.serving
    planes = {nic.plane: nic.interface for nic in server.nics if nic.plane != "compute"}
    return {
        "model": serving.model,
        "host": str(server.on("business")[0].address),
        "port": serving.port,
        "prefill_layout": serving.prefill_layout,
        "decode_layout": serving.decode_layout,
        "planes": planes | {"management_port": serving.management_port},
    }


def _gateway(topology: Topology, server: Server) -> dict[str, Any]:
    said = _common(topology, server)
    if server.on("compute"):
        said["planes"]["compute"] = _compute(topology, server)
    transfer = {"key_file": topology.serving.key_file, "transport": topology.serving.transport}
    return {"external": True} | said | {"discovery": {"register": True}, "transfer": transfer}


def _worker(topology: Topology, server: Server) -> dict[str, Any]:
    said, serving = _common(topology, server), topology.serving
    said["planes"] |= {"compute": _compute(topology, server), "worker_port": serving.worker_port}
    gateway = topology.server(topology.gateway).on("business")[0].address
    said["discovery"] = {"gateways": [f"http://{gateway}:{serving.port}"], "advertise": said["host"]}
    said["transfer"] = _transfer(topology, server)
    engine = serving.prefill_engine if server.role == "prefill" else serving.decode_engine
    if engine != "local":
        said[server.role] = {engine: {"ranks": max(1, len(server.accelerators))}}
    return said


def _compute(topology: Topology, server: Server) -> str:
    """Return how the compute plane is named on a host: by its interface, which holds against wrong routes; by its network where there are several."""
    nics = server.on("compute")
    return nics[0].interface if len(nics) == 1 else str(topology.planes["compute"].network)


def _transfer(topology: Topology, server: Server) -> dict[str, Any]:
    serving, nics = topology.serving, server.on("compute")
    network, rate = _compute(topology, server), nics[0].speed / 8
    said: dict[str, Any] = {"transport": serving.transport, "control": network, "key_file": serving.key_file}
    if serving.transport == "tcp":
        several = {"nics": [nic.interface for nic in nics]} if len(nics) > 1 else {"host": nics[0].interface}
        return said | several | {"flow": {"nic_bytes_per_s": rate}}
    devices = [nic.rdma for nic in nics]
    said |= {"host": str(nics[0].address), "flow": {"nic_bytes_per_s": rate * len(nics)}}
    if serving.transport == "mooncake":
        return said | {"mooncake": {"protocol": "rdma", "devices": devices}}
    return said | {"nixl": {"devices": [f"{device}:1" for device in devices], "transports": "rc"}}


def targets(topology: Topology) -> dict[str, str]:
    """Return Prometheus' targets as files for `file_sd_configs`: the gateway's metrics, and every host's node exporter, on the management plane."""
    port = topology.serving.management_port
    gateway = topology.server(topology.gateway)
    hosts = [_target(topology, server, NODE_EXPORTER_PORT) for server in topology.servers]
    return {
        "prometheus/regauge.json": json.dumps([_target(topology, gateway, port)], indent=2) + "\n",
        "prometheus/hosts.json": json.dumps(hosts, indent=2) + "\n",
    }


def _target(topology: Topology, server: Server, port: int) -> dict[str, Any]:
    labels = {"site": topology.site, "host": server.name, "role": server.role, "plane": "management"}
    return {"targets": [f"{server.on('management')[0].address}:{port}"], "labels": labels}
