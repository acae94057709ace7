#!/bin/bash
set -e
export CUDA_VISIBLE_DEVICES=0,1,2,3
llamafactory-cli train qwen3_lora_sft.yaml
