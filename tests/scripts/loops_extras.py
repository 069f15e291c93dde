"""Trains a small classifier with what else belongs to an update: clipping, schedulers, averages, a grad scaler."""

import torch
from points import begun, loops_of, parsed
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

criterion = nn.CrossEntropyLoss()


def clip_per_micro_batch(args, model, optimizer, loader):
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels) / args.accum
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)  # here: clip_per_micro_batch
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def clip_by_hand_per_micro_batch(args, model, optimizer, loader):
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels) / args.accum
        loss.backward()
        norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
        for parameter in model.parameters():
            parameter.grad.mul_(min(1.0, args.clip / norm.item()))  # here: clip_by_hand_per_micro_batch
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def clip_per_update(args, model, optimizer, loader):
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels) / args.accum
        loss.backward()
        if (i + 1) % args.accum == 0:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            optimizer.zero_grad()


def schedule_per_micro_batch(args, model, optimizer, loader):
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=16)
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels) / args.accum
        loss.backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()  # here: schedule_per_micro_batch


def schedule_per_update(args, model, optimizer, loader):
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=16)
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels) / args.accum
        loss.backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def average_per_micro_batch(args, model, optimizer, loader):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels) / args.accum
        loss.backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()
        average.update_parameters(model)  # here: average_per_micro_batch


def average_per_update(args, model, optimizer, loader):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels) / args.accum
        loss.backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)


def scaler_per_micro_batch(args, model, optimizer, loader):
    scaler = torch.amp.GradScaler(args.device, init_scale=256.0, growth_interval=100)
    for i, (features, labels) in enumerate(loader):
        with torch.autocast(args.device, dtype=torch.bfloat16):
            loss = criterion(model(features), labels) / args.accum
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # here: scaler_per_micro_batch
        if (i + 1) % args.accum == 0:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()


def scaler_per_update(args, model, optimizer, loader):
    scaler = torch.amp.GradScaler(args.device, init_scale=256.0, growth_interval=100)
    for i, (features, labels) in enumerate(loader):
        with torch.autocast(args.device, dtype=torch.bfloat16):
            loss = criterion(model(features), labels) / args.accum
        scaler.scale(loss).backward()
        if (i + 1) % args.accum == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def main():
    loops = loops_of(globals())
    args = parsed(loops, __doc__, clip=100.0, device="cpu", ignored=0)
    *begin, loader = begun(args)
    labels = loader.dataset.tensors[1]
    labels[: args.ignored] = criterion.ignore_index  # so many samples count for nothing, all at the beginning
    for _ in range(args.epochs):
        loops[args.loop](*begin, loader)


if __name__ == "__main__":
    main()
