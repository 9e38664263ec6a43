"""What requests used, and what that costs: receipts of every side, reconciled, stored, priced and billed. See docs/metering.md."""
