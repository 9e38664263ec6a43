"""A gateway's meter in a process of its own, to be killed: `store_process.py URL DURABLE MORE BATCH_S`.

It puts all receipts of DURABLE requests, flushes, says so, puts those of MORE others, says so, and waits for its end.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # it runs by itself
from meter_cases import NOON_US, request, signed
from regauge.meter.writer import Writer


def main(url: str, durable: int, more: int, batch_s: float) -> None:
    writer = Writer(url, batch_s=batch_s)
    for number in range(durable + more):
        if number == durable:
            writer.flush()
            print("durable", flush=True)
        for receipt in request(f"r-{number:04}", at_us=receipt_time(number)).values():
            writer.put(signed(receipt))
    print("put", flush=True)
    sys.stdin.read()


def receipt_time(number: int) -> int:
    return NOON_US + number * 1_000_000


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
