"""What is expected of the kernels on an H200, written before any was measured: the bars are the project's own, and a
second reader's figures stand beside the first's, so that the first measurement judges both."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prediction:
    """One row: what is measured, the share that is asked for, what is expected with the reason, and what the audit of
    the whole GPU path expects: as the kernels were then, where its words name none."""

    what: str
    bar: str
    prediction: str
    audit: str


PREDICTIONS: tuple[Prediction, ...] = (
    Prediction(
        "paged decode attention, 64k tokens or more in all",
        "0.85 of copy bandwidth",
        "0.80 to 0.90, whatever `max_model_len` is: counted, the busiest unit beside memory is idle for three quarters "
        "of the time, and 192 KiB per multiprocessor are under way where 26 are needed. One launch; a look at the "
        "lengths, and a merge of 2 to 3 µs where one sequence is shared by many programs",
        "0.80 to 0.87 from 256k tokens on, 0.60 to 0.80 with float8 keys; before lengths were read on the device 20 to "
        "35 % less under a long `max_model_len`",
    ),
    Prediction(
        "prefill attention, 8k, causal, heads of 128",
        "0.60 of 990 TFLOP/s",
        "0.50 to 0.65: two programs share a multiprocessor, so that one multiplies while the other takes its softmax; "
        "counted, shared memory leaves 0.93, and a bf16 product reaches 0.80 on random data. Keys come by gathered "
        "asynchronous copies and not by the tensor memory accelerator",
        "0.35 to 0.45; above 0.60 only with one producer and two consumer warp groups",
    ),
    Prediction(
        "the same in Gluon (TRIMTAB_GPU_WAYS=gluon-prefill)",
        "0.60 of 990 TFLOP/s",
        "0.60 to 0.70: counted, the matrix units bind (1.0), shared memory is at 0.88 of them, the L2 cache at 0.83, "
        "the softmax at 0.52 and in the shadow of both groups' products; a bf16 product reaches 0.80 on random data, "
        "and a causal tile's ends are a tenth. Below that if 32 copies of 2 KiB per pass are too many for the "
        "accelerator: then rows with blocks of 128 are faster than those of 16",
        "above 0.60",
    ),
    Prediction(
        "memory-bound kernels",
        "0.90 of copy bandwidth",
        "0.88 to 0.95 at 16k tokens: each byte is read and written once, in vectors of 16 bytes",
        "0.84 to 0.92; rotation and cache writes 0.70 to 0.85, with 4 KB a program; plain sampling 0.06 to 0.15, with "
        "one program a row",
    ),
    Prediction(
        "sampling, 256 rows of 128k in bf16",
        "0.90 of read bandwidth, greedy",
        "greedy 0.80 to 0.90; with limits 0.20 to 0.25 (counted: 0.27, of instructions); without limits 0.15 where "
        "every tile may win, as with random logits, and 0.5 or more where most cannot",
        "0.06 to 0.15 of a plain row, as it was then",
    ),
    Prediction(
        "products of 16 rows and fewer in bf16, with what stands beside them",
        "0.80 of weight-read bandwidth",
        "0.75 to 0.85 for matrices of 100 MiB; 0.6 for those of 32 to 48 MiB, which take 8 to 12 µs, 2 of them to "
        "begin and to add slices up",
        "about 5 launches a layer",
    ),
    Prediction(
        "fp8 block product, 1024 tokens and more",
        "0.70 of the measured fp8 peak",
        "0.55 to 0.75 untuned: counted, products and the fp32 additions after every 128 columns follow one another and "
        "leave 0.59 of 1,979 TFLOP/s, the L2 cache 0.61; the measured peak is expected near 1,400",
        "0.40 to 0.55; more only with persistent programs of two consumer groups",
    ),
    Prediction(
        "the same in Gluon (TRIMTAB_GPU_WAYS=gluon-float8)",
        "0.70 of the measured fp8 peak",
        "0.70 to 0.85: counted, the L2 cache binds at 0.81 of 1,979 TFLOP/s, by A100's figure for it, shared memory "
        "leaves 0.89, and additions hide behind the other group's products",
        "more than 0.55",
    ),
    Prediction(
        "fp8 block product, 32 tokens and fewer",
        "0.80 of weight-read bandwidth",
        "0.60 to 0.80: matrices of 16 MiB take 4 µs, of which the second launch of a shared sum is a good part; above "
        "0.80 for matrices of 100 MiB",
        "0.60 to 0.75; more with the sum inside the launch",
    ),
    Prediction(
        "fused MoE, Qwen3-30B-A3B and DeepSeek-V3 shapes",
        "0.65 of the binding limit",
        "0.50 to 0.70 for many tokens (counted: 0.81 of the tensor peak at best in bf16, 0.59 in fp8, less padded "
        "rows: a quarter at 256 tokens an expert); below 0.4 for one token, where eight launches take longer than the "
        "weights",
        "0.45 to 0.60 for many tokens, below 0.3 for one",
    ),
    Prediction(
        "Llama-3.1-8B, bf16, decode of 1, 32 and 256 sequences at 1k",
        "0.90, 0.85, 0.75 of the limit",
        "without CUDA graphs 0.3, 0.5 and 0.6: about 300 launches per step at 5 to 8 µs of host time. With them 0.80 "
        "to 0.88, 0.75 and 0.65: what is left are gaps of about 1 µs between kernels, and attention",
        "0.74 to 0.80, 0.70 to 0.76, 0.66 to 0.72; two phases that follow one another leave 0.89 at 256 at best",
    ),
    Prediction(
        "four layers of Llama-3.1-8B, 1 and 16 rows, one launch behind another and dependent",
        "0.85 of weight-read bandwidth",
        "0.75 to 0.85, and 0.03 to 0.06 more with dependent launches (TRIMTAB_GPU_WAYS=dependent-launches): a layer is "
        "101 µs of weights and six launches, whose gaps of about 1 µs and first reads then lie beside the one before",
        "names the lever and no figure",
    ),
    Prediction(
        "Llama-3.1-8B, prefill",
        "0.70 of 52.6k tokens/s",
        "0.65 to 0.75: cuBLAS products dominate at 1k tokens",
        "0.72 to 0.80",
    ),
    Prediction(
        "nano-vllm's workload, Qwen3-0.6B and 8B shapes",
        "0.60 of the ideal",
        "0.1 and 0.4 without CUDA graphs, 0.4 and 0.55 with",
        "0.45 to 0.55 and 0.58 to 0.65",
    ),
    Prediction(
        "GPU busy at 32 sequences or more",
        "0.97",
        "0.5 to 0.7 without CUDA graphs, 0.95 with",
        "out of reach, whatever the host does, while gaps of 1 µs between 330 kernels count as idle",
    ),
    Prediction(
        "live KV resize of 10 GiB under load",
        "stall of 200 ms at most",
        "about 50 ms: 64 regions in pages of 8 MiB are 1,280 pages, each created, mapped and released in an assumed "
        "36 µs, and 64 access calls of an assumed 100 µs; shrinking, 1,280 unmaps of an assumed 35 µs",
        "90 to 200 ms with pages of 4 MiB (2,560 of them)",
    ),
)
