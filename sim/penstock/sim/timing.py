"""How long a step takes."""

import math

import msgspec


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step, linear in what it holds. The default is an 8B model in bf16 on one H100: 5 ms to read the weights and 3
    of launches, 2 · 8 G flops a token at half of 800 Tflop/s, 128 KiB of KV a token at 3.3 TB/s."""

    base_s: float = 0.008
    prefill_token_s: float = 40e-6
    row_s: float = 20e-6
    """A row that decodes: sampling and sending."""
    context_token_s: float = 40e-9
    """A token of context of a row that decodes."""

    def steps(self, count: int, *, prefill: int, rows: int, context: int) -> float:
        """Seconds of `count` steps alike, each with `prefill` prompt tokens and `rows` rows that decode, over `context` tokens in
        the first step and `rows` more in each that follows."""
        each = self.base_s + self.prefill_token_s * prefill + self.row_s * rows + self.context_token_s * context
        return count * each + self.context_token_s * rows * count * (count - 1) / 2

    def fitting(self, seconds: float, *, rows: int, context: int, most: int) -> int:
        """How many steps that only decode end within `seconds`; `most` at most."""
        if self.steps(most, prefill=0, rows=rows, context=context) <= seconds:
            return most
        # count · each + grows · count · (count − 1) / 2 = seconds
        each = self.steps(1, prefill=0, rows=rows, context=context)
        grows = self.context_token_s * rows
        linear = each - grows / 2
        count = int((math.sqrt(linear**2 + 2 * grows * seconds) - linear) / grows) if grows else int(seconds / each)
        count = max(min(count, most - 1), 0)
        while count and self.steps(count, prefill=0, rows=rows, context=context) > seconds:  # by rounding
            count -= 1
        return count
