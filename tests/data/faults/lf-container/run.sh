#!/bin/bash
docker run --gpus all --network host --ipc host -v /data:/data llamafactory:latest \
    bash -c "FORCE_TORCHRUN=1 NNODES=2 NODE_RANK=0 MASTER_ADDR=10.20.0.11 MASTER_PORT=29500 llamafactory-cli train train.yaml"
