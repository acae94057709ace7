#!/bin/bash
ray start --head
trinity run --config grpo.yaml
