#!/usr/bin/env python3
"""Writes the files of PyTorch that the readers are tested with: `make.py FOLDER`. The files in this folder are of
torch 2.11. `tests/checkpoint/torch_files.rs` has the values, and runs this script where there is a torch."""
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def values(start, *shape):
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) / 8 + start).reshape(shape)


def state():
    return {
        "first.weight": values(1, 7, 5),
        "first.bias": values(-2, 7).to(torch.bfloat16),
        "second.weight": values(3, 4, 7).to(torch.float64),
        "second.bias": values(5, 4).to(torch.float16),
    }


def rank(index, world, folder, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=index, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    placements = [Shard(0), Replicate(), Shard(1), Replicate()]
    sharded = {
        name: distribute_tensor(tensor, mesh, [placement])
        for (name, tensor), placement in zip(state().items(), placements)
    }
    dcp.save({"model": sharded, "step": 3}, checkpoint_id=os.path.join(folder, "dcp"))
    dist.destroy_process_group()


class Attack:
    def __reduce__(self):
        return os.system, ("touch owned",)


def main(folder):
    os.makedirs(folder, exist_ok=True)
    path = lambda name: os.path.join(folder, name)
    flat = torch.nn.Module().state_dict()  # An OrderedDict with attributes, as all state dicts.
    # A view of a part of its storage, in another order.
    stored = torch.cat([torch.zeros(3), state()["first.weight"].t().reshape(-1)])
    flat.update(state(), **{"first.weight": stored[3:].reshape(5, 7).t()})
    flat["second.bias"] = torch.nn.Parameter(flat["second.bias"])
    torch.save(flat, path("pytorch_model.bin"))
    torch.save({"model": state(), "epoch": 3, "rates": [0.1], "done": None}, path("training.pt"))
    torch.save({"model": state(), "hook": Attack()}, path("attack.bin"))
    one = {"weight": values(1, 2, 3), "bias": values(2, 2).to(torch.bfloat16)}
    dcp.save(one, checkpoint_id=path("one_rank"), no_dist=True)
    port = 20000 + os.getpid() % 20000
    torch.multiprocessing.spawn(rank, args=(2, folder, port), nprocs=2)


if __name__ == "__main__":
    main(sys.argv[1])
