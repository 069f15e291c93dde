"""Trains two models with an optimizer each: apart from one another, or against one another."""

import torch
from points import loops_of, parsed
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import mse_loss

ROWS, WIDTH, NOISE = 128, 16, 8


def made(args):
    torch.manual_seed(args.seed)
    first = nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    second = nn.Sequential(nn.Linear(WIDTH, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (first, second)]
    data = torch.Generator().manual_seed(1)
    noise, real = torch.randn(ROWS, NOISE, generator=data), torch.randn(ROWS, WIDTH, generator=data) + 1
    return first, second, *optimizers, list(zip(noise.split(args.batch_size), real.split(args.batch_size), strict=True))


def interleaved(args):
    """Two models that have nothing to do with one another; each steps at the end of its own window."""
    first, second, step_first, step_second, batches = made(args)
    for i, (noise, real) in enumerate(batches):
        last = (i + 1) % args.accum == 0
        (mse_loss(first(noise), real) / args.divisor).backward()
        if last:
            step_first.step()
            step_first.zero_grad()
        (mse_loss(second(real), noise[:, :1]) / args.divisor).backward()  # here: interleaved
        if last:
            step_second.step()
            step_second.zero_grad()


def step_together(args):
    """The same where both step at the end of the loop: each has backward passes of its own."""
    first, second, step_first, step_second, batches = made(args)
    for i, (noise, real) in enumerate(batches):
        (mse_loss(first(noise), real) / args.accum).backward()
        (mse_loss(second(real), noise[:, :1]) / args.divisor).backward()  # here: step_together
        if (i + 1) % args.accum == 0:
            for optimizer in (step_first, step_second):
                optimizer.step()
                optimizer.zero_grad()


def shifted(args):
    """The second model's window ends half a window after the first's."""
    first, second, step_first, step_second, batches = made(args)
    half = args.accum // 2
    for i, (noise, real) in enumerate(batches):
        (mse_loss(first(noise), real) / args.accum).backward()
        if (i + 1) % args.accum == 0:
            step_first.step()
            step_first.zero_grad()
        if i >= half:
            before = batches[i - half]
            (mse_loss(second(before[1]), before[0][:, :1]) / args.accum).backward()
            if (i + 1 - half) % args.accum == 0:
                step_second.step()
                step_second.zero_grad()


def against(args):
    """A generator against a discriminator, window by window: the discriminator's whole window comes first."""
    generator, critic, step_generator, step_critic, batches = made(args)
    for at in range(0, len(batches), args.accum):
        window = batches[at : at + args.accum]
        step_critic.zero_grad()
        for noise, real in window:
            critic_loss(critic, generator(noise).detach(), real, args).backward()
        step_critic.step()
        step_generator.zero_grad()
        for noise, _ in window:
            generator_loss(generator, critic, noise, args).backward()
        step_generator.step()


def against_at_once(args):
    """Both losses of a micro-batch are differentiated in turn, and both optimizers step at the end of the window.

    The full batch's generator meets the stepped critic, the accumulated one's the old one; and what the generator's
    loss leaves in the critic's gradients is used by the critic's step.
    """
    generator, critic, step_generator, step_critic, batches = made(args)
    for i, (noise, real) in enumerate(batches):
        last = (i + 1) % args.accum == 0
        if args.accum == 1 or i % args.accum == 0:
            step_critic.zero_grad()
            step_generator.zero_grad()
        critic_loss(critic, generator(noise).detach(), real, args).backward()
        if args.accum == 1:
            step_critic.step()
        generator_loss(generator, critic, noise, args).backward()  # here: pollutes
        if last:
            if args.accum > 1:
                step_critic.step()
            step_generator.step()


def in_one_loop(args):
    """The same with noise that the loop draws, and one forward of the generator for both losses, as in a DCGAN."""
    generator, critic, step_generator, step_critic, batches = made(args)
    for i, (_, real) in enumerate(batches):
        last = (i + 1) % args.accum == 0
        if i % args.accum == 0:
            step_critic.zero_grad()
            step_generator.zero_grad()
        fake = generator(torch.randn(len(real), NOISE))
        critic_loss(critic, fake.detach(), real, args).backward()
        if last:
            step_critic.step()
        verdict = critic(fake)
        (bce(verdict, torch.ones_like(verdict)) / args.accum).backward()  # here: in_one_loop
        if last:
            step_generator.step()


def turns_of_updates(args, micro_batches=False):
    """The generator trains in every second update, on all of its micro-batches."""
    generator, critic, step_generator, step_critic, batches = made(args)
    for i, (noise, real) in enumerate(batches):
        turn = (i % (2 * args.accum) if micro_batches else i // args.accum % 2) == 0
        if turn:
            critic.requires_grad_(False)
            generator_loss(generator, critic, noise, args).backward()  # here: turns
            critic.requires_grad_(True)
        critic_loss(critic, generator(noise).detach(), real, args).backward()
        if (i + 1) % args.accum == 0:
            if i // args.accum % 2 == 0:
                step_generator.step()
                step_generator.zero_grad()
            step_critic.step()
            step_critic.zero_grad()


def turns_of_micro_batches(args):
    """The same where the generator is given the first micro-batch of its turn alone."""
    turns_of_updates(args, micro_batches=True)


def turns_after_the_critic(args, micro_batches=False):
    """The critic's window and step come first; in every second update the generator's follow."""
    generator, critic, step_generator, step_critic, batches = made(args)
    for at in range(0, len(batches), args.accum):
        window = batches[at : at + args.accum]
        step_critic.zero_grad()
        for noise, real in window:
            with torch.no_grad():
                fake = generator(noise)
            critic_loss(critic, fake, real, args).backward()
        step_critic.step()
        if at // args.accum % 2:
            step_generator.zero_grad()
            for noise, _ in window[-1:] if micro_batches else window:
                generator_loss(generator, critic, noise, args).backward()  # here: last turn
            step_generator.step()


def last_micro_batch_after_the_critic(args):
    """The same where the generator is given the last micro-batch of its turn alone."""
    turns_after_the_critic(args, micro_batches=True)


def critic_loss(critic, fake, real, args):
    yes, no = critic(real), critic(fake)
    return (bce(yes, torch.ones_like(yes)) + bce(no, torch.zeros_like(no))) / args.accum


def generator_loss(generator, critic, noise, args):
    verdict = critic(generator(noise))
    return bce(verdict, torch.ones_like(verdict)) / args.accum


def main():
    loops = loops_of(globals())
    args = parsed(loops, __doc__, undivided=False)
    args.divisor = 1 if args.undivided else args.accum
    loops[args.loop](args)


if __name__ == "__main__":
    main()
