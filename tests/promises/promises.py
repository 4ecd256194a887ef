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
        "After a kill at any moment, on a full disk or with a damaged last file, the same command continues the run. It"
        " ends with the same bits.",
        "The run continues from the files that SIGKILL leaves before every event in which Python opens, renames or"
        " removes a file. The short form tries all events of plain fine-tuning and one event of nine other methods; the"
        " long form tries all events of every method, and one event of low_bit with bits=auto. Further trials are"
        " SIGKILL at 20 random moments (long: 200), a kill within a write, a full file system of 1 MiB, $TMPDIR on"
        " another file system, a truncated checkpoint, and SIGKILL while resume=never moves an earlier run away.",
        kills.trials,
        "A disk that loses data after it has confirmed them, beyond the last checkpoint; network file systems that do"
        " not rename atomically; a folder that is edited during a run. Steps after the last checkpoint are computed"
        " again.",
    ),
    Promise(
        2,
        "A resumed run is the same run",
        "The weights, the states of the optimizer and the methods, the metrics and the accuracies equal those of an"
        " uninterrupted run, bit for bit.",
        "Every method is killed after the checkpoint at the end or in the middle of an epoch, with 0 or 2 worker"
        " processes (long: all four combinations; short: one combination per method). If class folders are exchanged, a"
        " byte is edited or a file is replaced, the resumed run is rejected and the change is named. After the data are"
        " restored from a copy without dates, the run continues.",
        resumption.trials,
        "A different processor, GPU, number of threads or processes, or version of PyTorch; image files that change"
        " during the run; the order of sums on a GPU, which PyTorch may choose again; times and energy.",
    ),
    Promise(
        3,
        "Two processes equal one process",
        "Two processes (DDP) with half a batch each train the same model as one process. The weights of both processes"
        " are the same bits, and they differ from those of one process only by rounding.",
        "Every method is trained with all random layers turned off (long: also with a last batch of an odd number of"
        " images). PatchDropout draws tokens in each process, so only its two processes are compared.",
        several.trials,
        "Bitwise equality with one process; more than two processes, and processes on several machines, which no trial"
        " starts; methods that depend on the whole batch (see the end of this page).",
    ),
    Promise(
        4,
        "A run stops instead of training nonsense",
        "A non-finite loss, gradient, weight or output ends the run with one message. Lack of memory does too, and the"
        " message names what would fit. No non-finite value is written.",
        "Learning rates from 1e10 to 3e38 in fp32, in bf16 and with 8-bit activations; NaN and infinity in pretrained"
        " weights; a batch that does not fit.",
        nonsense.trials,
        "Results that are finite and wrong: a learning rate that is too high but does not overflow, wrong labels,"
        " weights of a different model that fit. A process that the system kills for lack of memory prints no message.",
    ),
    Promise(
        5,
        "SIGTERM and Ctrl-C at any moment",
        "After the first second, a run that is asked to stop saves a checkpoint, reports how to continue, and ends with"
        " status 143 or 130 (other signals: 128 plus the number). The same command then ends with the bits of an"
        " uninterrupted run.",
        "Both signals are sent at 4 random moments (long: 100) to a run of one process, and to programs that load their"
        " libraries. SIGTERM, SIGHUP, SIGINT and SIGUSR1 are sent at 4 moments (long: 40) to the whole process group of"
        " a run with two worker processes, twice except for Ctrl-C.",
        signals.trials,
        "SIGKILL and power failures, which promise 1 covers; the first second of a start; the time that a scheduler"
        " leaves between its request and SIGKILL, if a checkpoint takes longer.",
    ),
    Promise(
        6,
        "Bad input never gives a traceback",
        "A mistake in settings, data, weights, run folders or records gives one message and exit status 2.",
        "30 random command lines and 20 broken inputs (long: 2,000 and 500). Each ends normally or with status 2,"
        " without a traceback and without a configuration printed as text. Six commands run with closed and with full"
        " standard streams.",
        bad_input.trials,
        "Errors inside PyTorch, a driver or a compiler; methods of other packages; files that change while they are"
        " read; libraries that crash the process.",
    ),
    Promise(
        7,
        "Nothing foreign is executed",
        "No command executes a file that a user receives (run folder, weights, checkpoint, record, study, images and"
        " their metadata), downloads code because of it, or follows it to other files.",
        "Pickles, YAML tags, Python files, arguments of Hydra and targets replace each file of a run folder, each of"
        " its settings (long: in every section), weights, a study, and files of data folders. Links replace files that"
        " a command writes. Settings, a config.json and lists of images name code or other files. Names contain"
        " formulas and escape sequences.",
        payloads.trials,
        "Your own arguments and configuration files, which may name any file to read or write; installed packages,"
        " whose methods and Hydra plugins are loaded; memory errors in image decoders and in torch.load (the"
        " requirements exclude versions with published ones); another user who changes a folder while a command works"
        " in it; the time, memory and disk space that a hostile file costs.",
    ),
    Promise(
        8,
        "A sweep finishes",
        "Jobs that die, hang, raise or exit do not stop the others. Each is listed with its reason, and a repeated"
        " sweep runs only these jobs.",
        "A sweep of seven jobs, of which four fail in four ways (long: also one that does not end when it is asked to,"
        " and one job at a time).",
        sweeps.trials,
        "A machine that fails: the same command then runs the remaining jobs. Jobs of other launchers (submitit,"
        " joblib), which report and end in their own way.",
    ),
    Promise(
        9,
        "Load",
        "A run on a million files starts within a minute and 1 GiB, a thousand runs are collected in 5 s, and a hundred"
        " thousand steps leak no memory, handles or processes.",
        "These numbers (short: 20,000 files, 100 runs and 1,500 steps, with the same limits).",
        scale.trials,
        "Slower disks and processors, which take longer; the time of a step; network folders.",
    ),
    Promise(
        10,
        "Recomputation is exact",
        "A part that runs again in the backward pass draws the same dropout, DropPath and tokens, and gives the same"
        " bits. Otherwise the methods reject it.",
        "Every method, with dropout, DropPath and random tokens, is recomputed by method checkpointing (each block's"
        " output and all gradients, bit for bit), by method compact (gradients to 1e-10 in float64), and by"
        " torch.utils.checkpoint, reentrant and not.",
        recomputation.trials,
        "Your own layers that draw from a separate generator, or keep a state that a forward pass changes; devices"
        " other than the CPU and CUDA; recomputation by other libraries.",
    ),
    Promise(
        11,
        "Budgets",
        "A run with memory= on a CPU never exceeds its budget by more than 0.5 %. It is rejected before anything is"
        " written, or it fits from start to end. results.json records its peak to 1 %.",
        "60 runs (short: 3) are drawn over tasks, networks, methods, batch sizes, evaluation batches, image sizes up to"
        " 36 megapixels and allocators. Their budgets are from 3 % below to 15 % above the memory that the program"
        " names. VmHWM is read from outside.",
        budgets.trials,
        "GPUs; several processes; memory of workers and of the page cache; systems other than Linux. A run whose"
        " prediction is too low is stopped at its budget; it may then exceed it by the largest tensor of one"
        " operation.",
    ),
)
