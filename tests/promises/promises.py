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
        "If a run is killed at any time, if the disk is full, or if the last checkpoint file is damaged, the same"
        " command continues the run. The result is equal to the result of an uninterrupted run, bit for bit.",
        "The trials continue a run from the files that exist if SIGKILL arrives before an event in which Python"
        " opens, renames or removes a file. The short form tests all events of plain fine-tuning and one event of"
        " nine other methods. The long form tests all events of every method, and one event of low_bit with"
        " bits=auto. Further trials are SIGKILL at 20 random times (long form: 200), a kill during a write, a full"
        " file system of 1 MiB, $TMPDIR on a different file system, a truncated checkpoint, and SIGKILL while"
        " resume=never renames an earlier run.",
        kills.trials,
        "Disks that lose data after they have confirmed the write, beyond the last checkpoint; network file systems"
        " that do not rename atomically; folders that are edited during a run. Steps after the last checkpoint are"
        " computed again.",
    ),
    Promise(
        2,
        "A resumed run is equal to an uninterrupted run",
        "The weights, the states of the optimizer and the methods, the metrics and the accuracies are equal to those"
        " of an uninterrupted run, bit for bit.",
        "For every method, a run is killed after the checkpoint at the end or in the middle of an epoch, with 0 or 2"
        " worker processes (long form: all four combinations; short form: one combination per method). If class"
        " folders are exchanged, a byte is edited or a file is replaced, the resumed run must be rejected and the"
        " message must name the change. If the data are restored from a copy with different dates, the run must"
        " continue.",
        resumption.trials,
        "A different processor, GPU, number of threads or processes, or version of PyTorch; image files that change"
        " during the run; the order of sums on a GPU, which PyTorch may choose differently; times and energy.",
    ),
    Promise(
        3,
        "Two processes are equivalent to one process",
        "Training with two processes (DDP), each with half of the batch, results in the same model as training with one"
        " process. The weights of both processes are equal, bit for bit. They differ from the weights of a single"
        " process only by rounding.",
        "Every method is trained with all random layers disabled (long form: also with a last batch of an odd number"
        " of images). PatchDropout samples tokens in each process, so its two processes are compared only with each"
        " other.",
        several.trials,
        "Bitwise equality with a single process; more than two processes, and processes on several machines, which"
        " are not tested; methods that depend on the whole batch (see the end of this page).",
    ),
    Promise(
        4,
        "A run stops if a value is not finite",
        "If a loss, gradient, weight or output is not finite, the run ends with one message. If the memory is not"
        " sufficient, the run also ends with a message, which suggests settings that fit. Non-finite values are never"
        " written.",
        "The trials use learning rates from 1e10 to 3e38 in fp32, in bf16 and with 8-bit activations, pretrained"
        " weights that contain NaN or infinity, and a batch that does not fit into memory.",
        nonsense.trials,
        "Results that are finite but wrong: a learning rate that is too high but does not cause an overflow, wrong"
        " labels, or weights of a different model that fit. If the system kills a process because of insufficient"
        " memory, no message is printed.",
    ),
    Promise(
        5,
        "SIGTERM and Ctrl-C stop a run with a checkpoint",
        "If a run receives a request to stop after its first second, it saves a checkpoint, reports how to continue,"
        " and ends with status 143 or 130 (other signals: 128 plus the number). The same command then continues the"
        " run, and the result is equal to the result of an uninterrupted run, bit for bit.",
        "Both signals are sent at 4 random times (long form: 100) to a run with one process, and to programs that"
        " are loading their libraries. SIGTERM, SIGHUP, SIGINT and SIGUSR1 are sent at 4 times (long form: 40) to the"
        " whole process group of a run with two worker processes. Except for Ctrl-C, each signal is sent twice.",
        signals.trials,
        "SIGKILL and power failures, which promise 1 covers; the first second after the start; a scheduler that"
        " sends SIGKILL before the checkpoint is complete.",
    ),
    Promise(
        6,
        "Invalid input never causes a traceback",
        "A mistake in settings, data, weights, run folders or records causes one message and exit status 2.",
        "The trials use 30 random command lines and 20 invalid inputs (long form: 2,000 and 500). Each command must"
        " end normally or with status 2, without a traceback and without printing the configuration. Six commands run"
        " with closed and with full standard streams.",
        bad_input.trials,
        "Errors inside PyTorch, a driver or a compiler; methods of other packages; files that change while they are"
        " read; libraries that crash the process.",
    ),
    Promise(
        7,
        "Code in received files is never executed",
        "If a user receives files (a run folder, weights, a checkpoint, a record, a study, images and their"
        " metadata), no command executes code in these files, downloads code because of them, or follows them to"
        " other files.",
        "Pickles, YAML tags, Python files, arguments of Hydra and targets replace each file of a run folder, each of"
        " its settings (long form: in every section), weights, a study, and files of data folders. Links replace"
        " files that a command writes. Settings, a config.json and lists of images refer to code or to other files."
        " Names contain formulas and escape sequences.",
        payloads.trials,
        "Your own arguments and configuration files, which may specify any file to read or write; installed"
        " packages, whose methods and Hydra plugins are loaded; memory errors in image decoders and in torch.load"
        " (the requirements exclude versions with published errors); other users who change a folder while a command"
        " uses it; the time, memory and disk space that a malicious file requires.",
    ),
    Promise(
        8,
        "A failed job does not stop a sweep",
        "If a job crashes, hangs, raises an error or exits, the other jobs continue. Each failed job is listed with"
        " the reason, and a repeated sweep runs only the failed jobs.",
        "A sweep of seven jobs runs, of which four fail in four ways (long form: also a job that does not end when"
        " it is requested to, and a sweep with one job at a time).",
        sweeps.trials,
        "A machine that fails (the same command then runs the remaining jobs); jobs of other launchers (submitit,"
        " joblib), which report errors and end in their own way.",
    ),
    Promise(
        9,
        "Large data sets and long runs",
        "A run on a million files starts within a minute and with at most 1 GiB of memory. A thousand runs are"
        " collected in 5 s. A hundred thousand steps do not leak memory, handles or processes.",
        "The trials use these numbers (short form: 20,000 files, 100 runs and 1,500 steps, with the same limits).",
        scale.trials,
        "Slower disks and processors, which require more time; the time of a step; network folders.",
    ),
    Promise(
        10,
        "Recomputation is exact",
        "If a part of the network runs again in the backward pass, it uses the same random numbers for dropout,"
        " DropPath and tokens, and produces the same result, bit for bit. Otherwise, the methods reject this part.",
        "Every method, with dropout, DropPath and random tokens, is recomputed by method checkpointing (the output"
        " of each block and all gradients are compared bit for bit), by method compact (gradients are compared to"
        " 1e-10 in float64), and by both variants of torch.utils.checkpoint (reentrant and non-reentrant).",
        recomputation.trials,
        "Your own layers that use a separate random generator, or have a state that a forward pass changes; devices"
        " other than the CPU and CUDA; recomputation by other libraries.",
    ),
    Promise(
        11,
        "Memory budgets",
        "A run with memory= on a CPU never exceeds its budget by more than 0.5 %. Either the run is rejected before"
        " any file is written, or its memory is within the budget from start to end. The peak in results.json is"
        " accurate to 1 %.",
        "60 runs (short form: 3) are sampled over tasks, networks, methods, batch sizes, evaluation batch sizes,"
        " image sizes up to 36 megapixels and allocators. Their budgets are from 3 % below to 15 % above the memory"
        " that the program reports as required. VmHWM is read from a different process.",
        budgets.trials,
        "GPUs; several processes; memory of workers and of the page cache; systems other than Linux. If the"
        " prediction for a run is too low, the run is stopped at its budget. In this case, it can exceed the budget"
        " by the largest tensor of one operation.",
    ),
)
