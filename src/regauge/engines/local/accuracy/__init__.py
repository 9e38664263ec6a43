"""What a crossing does to a model's answers: next-token agreement, KL divergence, perplexity, and the error of K and V.

For every document the first tokens are computed on the prefill layout, their KV crosses, and the tokens after them are teacher-forced on the
decode layout. `measure` compares with the same engine without a transfer; `record` makes of a row what `regauge.plan.quality` signs.
"""

from regauge.engines.local.accuracy.cases import MATRIX, from_options, table
from regauge.engines.local.accuracy.measure import Case, Measured, Row, Setting, measure, record

__all__ = ["MATRIX", "Case", "Measured", "Row", "Setting", "from_options", "measure", "record", "table"]
