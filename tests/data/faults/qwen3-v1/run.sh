export USE_V1=1
export NPROC_PER_NODE=8
llamafactory-cli sft v1_full.yaml
