"""Token bitmask: set the logits of all tokens that a grammar does not allow next to -inf.

logits   [num_rows, vocab_size] fp32, bf16 or fp16, changed in place
bitmask  [num_masked, num_words] int32 on the logits' device: bit t % 32 of word t // 32 is token t
rows     [num_masked] int64 on the same device: the row of logits of each mask; other rows are unchanged

```
y = bit set ? logit : -inf          tokens beyond 32 * num_words have no bit and are not allowed
y[0] = logit[0] if that is NaN      so that an incorrectly computed row differs from one without allowed tokens
```
Memory-bound: the logits of the masked rows, read and written once. Source: own.
"""

import numpy as np
import torch

WORD_BITS = 32


def apply_token_bitmask_reference(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Apply one token at a time."""
    for mask, row in zip(bitmask.tolist(), rows.tolist(), strict=True):
        for token in range(logits.shape[1]):
            word = mask[token // WORD_BITS] if token // WORD_BITS < len(mask) else 0
            is_allowed = word >> (token % WORD_BITS) & 1
            if not is_allowed and (token > 0 or not logits[row, token].isnan()):
                logits[row, token] = float("-inf")


def apply_token_bitmask_cpu(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Unpack bits with numpy, at a byte per clock; torch's shifts would take four bytes per bit."""
    bits = np.unpackbits(bitmask.numpy().view(np.uint8), axis=1, bitorder="little", count=logits.shape[1])
    refused = torch.from_numpy(bits).eq_(0).view(torch.bool)
    for mask, row in zip(refused, rows.tolist(), strict=True):
        logits[row].masked_fill_(mask, float("-inf"))


def apply_token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Mask the logits in place, without a synchronisation with the device.

    Raises:
        ValueError: shapes or types do not match.
    """
    if logits.dim() != 2 or bitmask.dim() != 2 or bitmask.dtype != torch.int32 or rows.shape != bitmask.shape[:1]:
        raise ValueError(
            f"apply_token_bitmask: logits is {list(logits.shape)}, bitmask {list(bitmask.shape)} of {bitmask.dtype} "
            f"for rows {list(rows.shape)}; they must be [num_rows, vocab_size], and [len(rows), num_words] of int32"
        )
    column = logits.select(1, 0)
    firsts = column.index_select(0, rows)
    if logits.device.type == "cpu":
        apply_token_bitmask_cpu(logits, bitmask, rows)
    else:
        _apply_on_device(logits, bitmask, rows)
    column.index_copy_(0, rows, torch.where(firsts.isnan(), firsts, column.index_select(0, rows)))


def _apply_on_device(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    refused = (bitmask.unsqueeze(-1) >> shifts).bitwise_and_(1).flatten(1)[:, : logits.shape[1]].eq(0)
    missing = logits.shape[1] - refused.shape[1]
    if missing > 0:
        refused = torch.nn.functional.pad(refused, (0, missing), value=True)
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(refused, float("-inf")))
