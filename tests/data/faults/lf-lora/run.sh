#!/bin/bash
set -euo pipefail
export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
FORCE_TORCHRUN=1 NPROC_PER_NODE=8 llamafactory-cli train train.yaml
