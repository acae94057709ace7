#!/bin/bash
USE_MEGATRON_BRIDGE=1 CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 llamafactory-cli train train.yaml
