export CUDA_DEVICE_MAX_CONNECTIONS=1
export NNODES=2
export NODE_RANK=0
export NPROC_PER_NODE=8
export MASTER_ADDR=10.1.0.1
export MASTER_PORT=29600
USE_MCA=1 llamafactory-cli train qwen3_moe.yaml
