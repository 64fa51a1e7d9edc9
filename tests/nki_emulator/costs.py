# SPDX-License-Identifier: Apache-2.0
"""What instructions cost on trn2: every constant with its source. Nothing here was measured on a device by this project.

[D] is the documentation (github.com/aws-neuron/aws-neuron-sdk), [A] an assumption where the documentation gives no figure.
"""

GHZ = {"tensor": 2.4, "vector": 0.96, "scalar": 1.2, "gpsimd": 1.2, "sync": 1.2}
"""[D] trainium2_arch.rst, Compute Engine Specifications. The sync engine has no figure there: [A] as ScalarE."""

ISSUE_CYCLES = 64
"""[D] nki.api.shared.rst, MIN_II: the least cycles between two instructions of an engine."""

DEPENDENT_CYCLES = 100
"""[D] trainium_inferentia2_arch.rst, Vector Engine, Cost Model: overhead where an instruction needs the one before it."""

FP32_MATMUL = 4
"""[D] trainium_inferentia2_arch.rst, Tensor Engine, Cost Model: fp32 matmul against bf16."""

FP32_TRANSPOSE = 2
"""[D] trainium2_arch.rst, Built-in Transpose Support: half of an fp32 matmul."""

FAST_LOAD = 4
"""[D] trainium_inferentia2_arch.rst, Fast LoadStationary: weights load up to 4 columns per cycle, beside the matmul before."""

STRIDE_BYTES = 16
"""[D] trainium_inferentia2_arch.rst, Access pattern: an innermost stride above this halves the bandwidth."""

RECIPROCAL_VECTOR = 8
"""[D] nki.api.shared.rst, Engine Selection: cycles per element of nisa.reciprocal."""

RSQRT_GPSIMD = 4
"""[D] the same: GpSimd's rsqrt is 4x slower than ScalarE's."""

READ_ACCUMULATOR = 64
"""[D] trainium_inferentia2_arch.rst, Pipelined Reduction: cycles to write the reduce registers out."""

GPSIMD_TENSOR_TENSOR = 2
"""[A] cycles per element, as for two inputs on VectorE."""

DMA_FIXED_US = 2.0
"""[D] nki-dma-bandwidth-guide.rst gives 1.3 us from semaphore to start; about 2 us per DMA with setup and completion."""

DMA_BYTES_PER_US = 362_500.0
"""[D] trainium2: 2.9 TB/s of HBM over 8 cores; the 16 DMA engines of a core give 16 x 23 B/ns = 368 B/ns."""

DMA_RUN_OVERHEAD = 512
"""[A] bytes that a descriptor costs beside its payload: 89 % of the peak at 4 KiB, 80 % at 2 KiB, 33 % at 256 B. The guide
gives the shape only (saturated from 4 KiB, near it from 2 KiB, a small fraction below 256 B)."""

SWDGE_CYCLES_PER_ROW = 8
"""[A] GpSimd cycles per descriptor that a gather or scatter generates; the documentation says that it takes GpSimd's time."""

LOOP_CYCLES = 100
"""[A] per iteration of fori_loop and while_loop; no figure is documented."""

BARRIER_US = 1.3
"""[D] nki-dma-bandwidth-guide.rst: semaphore to start across engines; [A] the same across the two cores."""

PARTITIONS = 128
SBUF_PARTITION_BYTES = 224 * 1024
"""[D] trainium2_arch.rst: 28 MiB."""
SBUF_USABLE_BYTES = 200 * 1024
"""What nki-library plans with; the compiler keeps the rest."""
PSUM_BANK_BYTES, PSUM_BANKS = 2048, 8
"""[D] trainium_inferentia2_arch.rst: 16 KiB per partition in 8 banks."""
