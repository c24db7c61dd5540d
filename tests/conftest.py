"""Before torch is imported, and for the processes that tests start."""

import os

# Some virtual machines advertise AMX without granting it; oneDNN's bf16 matrix product then dies of
# an illegal instruction. The limit is one step below.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
