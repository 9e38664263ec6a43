"""regauge: Prefill-as-a-Service over heterogeneous accelerators."""

__version__ = "0.1.0"
