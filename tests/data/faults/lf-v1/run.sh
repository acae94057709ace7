#!/bin/bash
export USE_V1=1
CUDA_VISIBLE_DEVICES=0,1,2,3 llamafactory-cli sft train.yaml
