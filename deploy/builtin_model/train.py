"""Train the built-in model: a small Llama on the Python standard library's own sources.

    python deploy/builtin_model/train.py --minutes 41

The script reads the `.py` files of the running Python and trains a byte-level BPE tokenizer. Then it trains the
model for a fixed time. Every schedule depends on the elapsed share of that time, so the learning rate has decayed
at its end. The script measures the held-out loss and writes a Hugging Face folder: without --out, the one in the
package.
"""

import argparse
import datetime
import json
import math
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import EOT_ID, Windows, encode, read_sources, train_tokenizer
from export import export_model, export_tokenizer, import_model, verify_export, write_json
from llama import Llama, ModelConfig, token_losses
from torch import Tensor, nn

BUILTIN_MODEL = Path(__file__).resolve().parents[2] / "shared" / "model" / "builtin"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The recipe. Fractions are shares of the training time."""

    minutes: float
    batch_tokens: int = 6144
    micro_tokens: int = 2048
    short_len: int = 512
    long_fraction: float = 0.15  # the last part trains on windows of the full context
    warmup_fraction: float = 0.02
    decay_fraction: float = 0.5
    muon_lr: float = 0.02
    adam_lr: float = 4e-3
    weight_decay: float = 0.1
    checkpoint: Path | None = None  # where to keep the weights every 100 steps
    lr_factor: float = 1.0  # below 1 when an earlier run is continued
    seed: int = 0


def lr_scale(done: float, cfg: TrainConfig) -> float:
    """Return the factor of the learning rates: warm-up, constant, then linear decay to zero."""
    return max(0.0, min(1.0, done / cfg.warmup_fraction + 0.02, (1.0 - done) / cfg.decay_fraction))


def make_optimizers(model: Llama, cfg: TrainConfig) -> list[torch.optim.Optimizer]:
    """Make Muon for the matrices of the layers, and AdamW for the embedding and the norms."""
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim < 2 or p is model.embed_tokens.weight]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=cfg.muon_lr, momentum=0.95, weight_decay=cfg.weight_decay),
        torch.optim.AdamW(others, lr=cfg.adam_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0),
    ]
    for group in (g for optimizer in optimizers for g in optimizer.param_groups):
        group["peak_lr"] = group["lr"]
    return optimizers


def train(model: Llama, docs: list[Tensor], cfg: TrainConfig, max_len: int) -> tuple[int, int]:
    """Train for `cfg.minutes`. Returns the numbers of steps and of tokens."""
    losses_of = torch.compile(token_losses, dynamic=False)
    optimizers = make_optimizers(model, cfg)
    windows = Windows(docs, cfg.seed)
    batches = {n: windows.batches(cfg.micro_tokens // n, n) for n in (cfg.short_len, max_len)}
    num_micro = cfg.batch_tokens // cfg.micro_tokens
    start, step, tokens, smooth = time.monotonic(), 0, 0, 0.0
    while (done := (time.monotonic() - start) / (60 * cfg.minutes)) < 1.0:
        seq_len = max_len if done > 1.0 - cfg.long_fraction else cfg.short_len
        loss = 0.0
        for _ in range(num_micro):
            micro_loss = losses_of(model, next(batches[seq_len])).mean() / num_micro
            micro_loss.backward()
            loss += micro_loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * cfg.lr_factor * lr_scale(done, cfg)
            optimizer.step()
            optimizer.zero_grad()
        step, tokens = step + 1, tokens + cfg.batch_tokens
        smooth = 0.95 * smooth + 0.05 * loss if step > 1 else loss
        if step % 10 == 0:
            rate = tokens / (time.monotonic() - start)
            print(f"{done:6.1%} step {step} len {seq_len} loss {smooth:.3f} {rate:.0f} tok/s", flush=True)
        if cfg.checkpoint and step % 100 == 0:
            torch.save(model.state_dict(), cfg.checkpoint)
    return step, tokens


@torch.no_grad()
def held_out_losses(model: nn.Module, docs: list[Tensor], seq_len: int) -> Tensor:
    """Return the loss of held-out tokens by position, (N, seq_len), in nats. An incomplete window is dropped."""
    windows_NT = torch.cat([torch.tensor([EOT_ID]), *docs]).unfold(0, seq_len + 1, seq_len)
    return torch.cat([token_losses(model, w) for w in windows_NT.split(2)])


def measure(model: Llama, docs: list[Tensor], num_bytes: int, cfg: ModelConfig) -> dict[str, float]:
    """Measure the held-out loss over windows of the full context, also by position and per byte of text."""
    losses_NS = held_out_losses(model, docs, cfg.max_len)
    per_token = losses_NS.mean().item()
    return {
        "held_out_nats_per_token": round(per_token, 4),
        "held_out_perplexity": round(math.exp(per_token), 2),
        "held_out_nats_per_byte": round(per_token * sum(map(len, docs)) / num_bytes, 4),
        "held_out_nats_positions_0_511": round(losses_NS[:, :512].mean().item(), 4),
        "held_out_nats_positions_512_2047": round(losses_NS[:, 512:].mean().item(), 4),
    }


def main() -> None:
    """Train, export, verify, measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=41.0, help="training time, with compilation")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, help="a file that keeps the weights every 100 steps")
    parser.add_argument(
        "--resume", type=Path, help="a folder that an earlier run wrote; its weights are trained on"
    )
    parser.add_argument("--lr-factor", type=float, default=1.0, help="scales every learning rate")
    parser.add_argument("--out", type=Path, default=BUILTIN_MODEL)
    parser.add_argument("--machine", default="2-core AMD EPYC, no GPU", help="written into training.json")
    args = parser.parse_args()
    cfg = ModelConfig()
    seed = 1 if args.resume else 0
    recipe = TrainConfig(
        minutes=args.minutes, checkpoint=args.checkpoint, lr_factor=args.lr_factor, seed=seed
    )
    torch.set_num_threads(args.threads)
    torch.manual_seed(recipe.seed)

    texts, held_out_texts = read_sources(Path(sysconfig.get_paths()["stdlib"]))
    tokenizer = train_tokenizer(texts, cfg.vocab_size)
    docs, held_out = encode(tokenizer, texts), encode(tokenizer, held_out_texts)
    args.out.mkdir(parents=True, exist_ok=True)
    export_tokenizer(tokenizer, args.out, cfg.max_len)
    print(f"{len(docs)} files, {sum(map(len, docs))} tokens; held out {len(held_out)} files", flush=True)

    model = Llama(cfg)
    earlier = {"steps": 0, "tokens_seen": 0, "wall_minutes": 0.0}
    if args.resume:
        import_model(model, args.resume)
        earlier = json.loads((args.resume / "training.json").read_text())
    steps, tokens = train(model, docs, recipe, cfg.max_len)
    export_model(model, cfg, args.out)
    verify_export(args.out, cfg, docs)
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16).float()  # measure what was saved
    result = measure(model, held_out, sum(len(t.encode()) for t in held_out_texts), cfg) | {
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_files": len(docs),
        "train_tokens": sum(map(len, docs)),
        "held_out_files": len(held_out),
        "held_out_tokens": sum(map(len, held_out)),
        "steps": earlier["steps"] + steps,
        "tokens_seen": earlier["tokens_seen"] + tokens,
        "wall_minutes": earlier["wall_minutes"] + recipe.minutes,
        "machine": args.machine,
        "date": datetime.date.today().isoformat(),
    }
    write_json(args.out / "training.json", result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
