#!/bin/bash
pdsh -w node0,node1 "cd /run && NNODES=2 NODE_RANK=\$(hostname | grep -o [0-9]*) MASTER_ADDR=node0 MASTER_PORT=29500 FORCE_TORCHRUN=1 llamafactory-cli train train.yaml"
