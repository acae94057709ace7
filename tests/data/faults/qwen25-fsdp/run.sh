#!/bin/bash
accelerate launch --config_file fsdp.yaml src/train.py fsdp_full.yaml
