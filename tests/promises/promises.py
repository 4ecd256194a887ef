"""The promises of a run to its user, with their trials."""

from __future__ import annotations

from tests.promises import (
    bad_input,
    budgets,
    kills,
    nonsense,
    payloads,
    recomputation,
    resumption,
    scale,
    several,
    signals,
    sweeps,
)
from tests.promises.trial import Promise

PROMISES = (
    Promise(
        1,
        "A checkpoint is never lost",
        "After a kill at any moment, on a full disk or with a damaged last file, the same command continues, and ends"
        " with the same bits.",
        "SIGKILL before every event in which Python opens, renames or removes a file of the run, for plain fine-tuning"
        " (long: for every method, low_bit with bits=auto before one event; short: before one event, for nine others);"
        " SIGKILL at 20 random moments (long: 200); a kill within a write; a file system of 1 MiB that is full; $TMPDIR"
        " on another file system; a checkpoint that is cut off; SIGKILL before the first file events while resume=never"
        " moves an earlier run away, which stays whole in one folder.",
        kills.trials,
        "Disks that lose what they have confirmed, beyond the last checkpoint; file systems on a network that do"
        " not rename atomically; a folder that is changed by hand during a run. Steps after the last checkpoint are"
        " computed again.",
    ),
    Promise(
        2,
        "A resumed run is the same run",
        "Weights, optimizer, methods' state, metrics and accuracies equal those of a run without interruption,"
        " bit for bit.",
        "Every method, killed after the checkpoint at the end or in the middle of an epoch, with 0 or 2 worker"
        " processes (long: all four combinations; short: one for each method, in turn). With class folders exchanged,"
        " a byte edited or a file replaced, the resumed run is refused, and the change named; with the data restored"
        " from a copy without dates, it continues.",
        resumption.trials,
        "Another processor, GPU, number of threads or processes, or version of PyTorch; image files that are"
        " changed during the run; the order of sums on a GPU, which PyTorch may choose again; times and energy.",
    ),
    Promise(
        3,
        "Two processes are the same as one",
        "Two processes (DDP) with half a batch each train what one process trains: their weights are the same bits, and"
        " differ from those of one process by rounding.",
        "Every method, with everything random turned off (long: also with a last batch of an odd number of images);"
        " random choices of tokens (PatchDropout) are drawn in each process, and only the two processes are compared.",
        several.trials,
        "Equality with one process bit for bit; more than two processes, and processes on several machines, which"
        " no trial starts; methods that depend on the whole batch (see the end of this page).",
    ),
    Promise(
        4,
        "It stops rather than train nonsense",
        "Losses, gradients, weights and outputs that are not finite end the run with one message, and so does a lack of"
        " memory, with what would fit. Nothing that is not finite is written.",
        "Learning rates from 1e10 to 3e38 in fp32, in bf16 and with activations in 8 bits; NaN and infinity in"
        " pretrained weights; a batch that does not fit.",
        nonsense.trials,
        "Results that are finite and wrong: a learning rate that is too high without an overflow, wrong labels,"
        " weights of another model that fit. A process that the system kills for lack of memory prints no message.",
    ),
    Promise(
        5,
        "SIGTERM and Ctrl-C at any moment",
        "After the first second a run that is asked to stop saves, says how to continue, and ends with status 143 or"
        " 130 (another signal: 128 and its number); the same command then ends with the bits of a run without"
        " interruption.",
        "Both signals at 4 random moments (long: 100) of a run of one process, and to programs that load their"
        " libraries; SIGTERM, SIGHUP, SIGINT and SIGUSR1 to the whole process group of a run with two worker processes,"
        " twice except Ctrl-C, at 4 moments (long: 40).",
        signals.trials,
        "SIGKILL and power failures, for which promise 1 holds; the first second of a start; the time that a"
        " scheduler leaves between its request and SIGKILL, if a checkpoint takes longer.",
    ),
    Promise(
        6,
        "Bad input never gives a traceback",
        "A mistake in settings, data, weights, run folders or records is one message, with status 2.",
        "30 random command lines and 20 broken inputs (long: 2,000 and 500). Each must end well, or with status 2,"
        " without a traceback, and without a configuration printed as text. Six commands with closed and with full"
        " standard streams.",
        bad_input.trials,
        "Errors inside PyTorch, a driver or a compiler; methods of other packages; files that are changed while"
        " they are read; libraries that crash the process.",
    ),
    Promise(
        7,
        "Nothing foreign is executed",
        "No file that a user is handed (run folder, weights, checkpoint, record, study, images and their metadata) is"
        " executed by any command that reads it, makes it fetch code, or leads it to files elsewhere.",
        "Pickles, YAML tags, Python files, arguments of Hydra and targets in place of each file of a run folder, of"
        " each setting in it (long: of every section), of weights, of a study, and in data folders; links in place of"
        " files that a command writes; settings, a config.json and lists of images that name code or files elsewhere;"
        " names that are formulas or escape sequences.",
        payloads.trials,
        "Your own arguments and configuration files, which may name any file to read or write; packages that you"
        " install, whose methods and Hydra plugins are loaded; memory errors in decoders of images and in torch.load"
        " (the requirements exclude versions with published ones); another user who changes a folder while a command"
        " works in it; the time, memory and disk that a hostile file costs.",
    ),
    Promise(
        8,
        "A sweep finishes",
        "Jobs that die, hang, raise or leave do not stop the others; each is named with its reason, and a repeated"
        " sweep runs only these.",
        "A sweep of seven jobs of which four fail in four ways (long: also one that does not end when it is asked to,"
        " and one job at a time).",
        sweeps.trials,
        "A machine that fails: the same command then runs the rest. Jobs of other launchers (submitit, joblib),"
        " which report and end in their own way.",
    ),
    Promise(
        9,
        "Load",
        "A million files start within a minute and 1 GiB, a thousand runs are collected in 5 s, and a hundred thousand"
        " steps leak no memory, handles or processes.",
        "These numbers (short: 20,000 files, 100 runs and 1,500 steps, with the same limits).",
        scale.trials,
        "Slower disks and processors, on which these times are longer; the time of a step; folders on a network.",
    ),
    Promise(
        10,
        "Recomputation is exact",
        "A part that runs again in the backward pass draws the same dropout, DropPath and tokens, and gives the same"
        " bits; or the methods refuse it.",
        "Every method, with dropout, DropPath and random tokens, recomputed by method checkpointing (each block's"
        " output and all gradients, bit for bit), by method compact (gradients to 1e-10 in float64), and by"
        " torch.utils.checkpoint, reentrant and not.",
        recomputation.trials,
        "Layers of your own that draw from a generator of their own, or keep a state that a forward pass changes;"
        " devices other than the CPU and CUDA; recomputation by other libraries.",
    ),
    Promise(
        11,
        "Budgets",
        "A run with memory= on a CPU exceeds its budget at no moment by more than 0.5 %: it is rejected before anything"
        " is written, or it fits from start to end; and results.json records its peak to 1 %.",
        "60 runs drawn over tasks, networks, methods, batches, evaluation batches, image sizes up to 36 megapixels and"
        " allocators (short: 3), with budgets from 3 % below to 15 % above the memory that the program names; VmHWM is"
        " read from outside. Not covered: GPUs, several processes, memory of workers and of the page cache, systems"
        " other than Linux. A run whose prediction is too low is stopped at its budget; it may then exceed it by the"
        " largest tensor of one operation.",
        budgets.trials,
    ),
)
