export USE_MEGATRON_BRIDGE=1
export NPROC_PER_NODE=8
llamafactory-cli train llama3_bridge.yaml
