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
        " command continues the run. The result is bitwise identical to the result of an uninterrupted run.",
        "The trials copy a run folder before an event in which Python opens, renames or removes a file, and continue"
        " the run from the copy. The copy contains the files that SIGKILL would leave at this time. The short form"
        " tests all events of plain fine-tuning and one event of nine other methods. The long form tests all events"
        " of every method, and one event of low_bit with bits=auto. Further trials send SIGKILL at 20 random times"
        " (long form: 200), during a write, and while resume=never renames an earlier run. Other trials use a full"
        " file system of 1 MiB, a folder for temporary files ($TMPDIR) on a different file system, and a truncated"
        " checkpoint.",
        kills.trials,
        "This promise does not cover disks that confirm writes and then lose more than the last checkpoint, network"
        " file systems that do not rename atomically, or folders that are edited during a run. Steps after the last"
        " checkpoint are computed again.",
    ),
    Promise(
        2,
        "A resumed run is equal to an uninterrupted run",
        "The weights, the states of the optimizer and the methods, the metrics and the accuracies are bitwise"
        " identical to those of an uninterrupted run.",
        "For every method, a run is killed after a checkpoint at the end or in the middle of an epoch, with 0 or 2"
        " worker processes, and is then resumed. The long form tests all four combinations for each method, and the"
        " short form tests one combination. Further trials exchange class folders, edit a byte or replace a file. In"
        " these trials, the resumed run must be rejected, and the message must name the change. If the data are"
        " restored from a copy with different dates, the run must continue.",
        resumption.trials,
        "This promise does not apply if the processor, the GPU, the number of threads or processes, or the version"
        " of PyTorch is different, or if image files change during the run. On a GPU, PyTorch may compute sums in a"
        " different order. Times and energy are not reproduced.",
    ),
    Promise(
        3,
        "Two processes are equivalent to one process",
        "Training with two processes (DDP), each with half of the batch, results in the same model as training with"
        " one process. The weights of both processes are bitwise identical. The weights differ from the weights of a"
        " single process only by rounding errors.",
        "Every method is trained with all random layers disabled. The long form also tests a last batch with an odd"
        " number of images. PatchDropout samples tokens in each process, so the two processes are compared only with"
        " each other.",
        several.trials,
        "This promise does not include bitwise equality with a single process. More than two processes, and"
        " processes on several machines, are not tested. Methods that depend on the whole batch are not covered (see"
        " the end of this page).",
    ),
    Promise(
        4,
        "A run stops if a value is not finite",
        "If a loss, gradient, weight or output is not finite, the run ends with one message. If the memory is not"
        " sufficient, the run also ends with a message, which suggests settings that require less memory. Non-finite"
        " values are never written.",
        "The trials use learning rates from 1e10 to 3e38 (in fp32, in bf16 and with 8-bit activations), pretrained"
        " weights that contain NaN or infinity, and a batch that does not fit into memory.",
        nonsense.trials,
        "This promise does not cover results that are finite but wrong. Examples are results of wrong labels, of"
        " weights of a different model whose shapes match, and of a learning rate that is too high but does not cause"
        " an overflow. If the system kills a process because of insufficient memory, no message is printed.",
    ),
    Promise(
        5,
        "SIGTERM and Ctrl-C stop a run with a checkpoint",
        "If a run receives SIGTERM or SIGINT (Ctrl-C) after its first second, the run saves a checkpoint, reports"
        " how to continue, and exits with status 143 or 130. For other signals, the exit status is 128 plus the"
        " number of the signal. The same command then continues the run, and the result is bitwise identical to the"
        " result of an uninterrupted run.",
        "SIGTERM and SIGINT are sent at 4 random times (long form: 100) to a run with one process, and to programs"
        " that are loading their libraries. SIGTERM, SIGHUP, SIGINT and SIGUSR1 are sent at 4 times (long form: 40)"
        " to the whole process group of a run with two worker processes. Each signal except SIGINT is sent twice.",
        signals.trials,
        "This promise does not cover SIGKILL and power failures (see promise 1), the first second after the start,"
        " or a scheduler that sends SIGKILL before the checkpoint is complete.",
    ),
    Promise(
        6,
        "Invalid input never causes a traceback",
        "A mistake in settings, data, weights, run folders or records causes one message and exit status 2.",
        "The trials use 30 random command lines and 20 invalid inputs (long form: 2,000 and 500). Each command must"
        " end normally or with status 2, without a traceback and without printing the configuration. Six commands are"
        " also tested with standard streams that are closed or that cannot be written because the device is full.",
        bad_input.trials,
        "This promise does not cover errors inside PyTorch, a driver or a compiler, methods of other packages, files"
        " that change while they are read, or libraries that crash the process.",
    ),
    Promise(
        7,
        "Code in received files is never executed",
        "No command executes code from files that a user receives, downloads code that these files request, or opens"
        " other files to which these files refer. Received files are run folders, weights, checkpoints, records,"
        " studies, images and their metadata.",
        "The trials replace each file of a run folder, each setting of a run (long form: in every section), weights,"
        " a study, and files of data folders with malicious contents. The malicious contents are pickles, YAML tags,"
        " Python files, arguments of Hydra and Hydra targets. Files that a command writes are replaced with links."
        " Settings, a config.json and lists of images refer to code or to other files. Names of run folders contain"
        " spreadsheet formulas and terminal escape sequences.",
        payloads.trials,
        "This promise does not cover your own arguments and configuration files, which may specify any file to read"
        " or write, or installed packages, whose methods and Hydra plugins are loaded. Memory errors in image"
        " decoders and in torch.load are not covered, although the requirements exclude versions with published"
        " errors. Other users who change a folder while a command uses the folder, and the time, memory and disk"
        " space that a malicious file requires, are not covered either.",
    ),
    Promise(
        8,
        "A failed job does not stop a sweep",
        "If a job crashes, hangs, raises an error or exits, the other jobs continue. Each failed job is listed with"
        " the reason, and a repeated sweep runs only the failed jobs.",
        "The trial runs a sweep of seven jobs, of which four fail in four different ways. The long form also tests a"
        " job that ignores the request to end, and a sweep that runs one job at a time.",
        sweeps.trials,
        "This promise does not cover a failure of the machine. In this case, run the same command again to run the"
        " remaining jobs. Jobs of other launchers (submitit, joblib) report errors and end in their own way.",
    ),
    Promise(
        9,
        "Large data sets and long runs",
        "A run on a million files starts within a minute and with at most 1 GiB of memory. A thousand runs are"
        " collected in 5 s. A hundred thousand steps do not leak memory, handles or processes.",
        "The long form uses these numbers. The short form uses 20,000 files, 100 runs and 1,500 steps, with the same"
        " limits.",
        scale.trials,
        "Slower disks and processors require more time. The time of a step and network folders are not covered.",
    ),
    Promise(
        10,
        "Recomputation is exact",
        "If a part of the network is recomputed in the backward pass, the recomputation uses the same random numbers"
        " for dropout, DropPath and token sampling, and the result is bitwise identical. A part that cannot be"
        " recomputed exactly is rejected.",
        "Every method is recomputed in networks with dropout, DropPath and random tokens. For the method"
        " checkpointing, the output of each block and all gradients are compared bit for bit. For the method compact,"
        " the gradients are compared in float64 with a tolerance of 1e-10. Both variants of torch.utils.checkpoint"
        " (reentrant and non-reentrant) are also tested.",
        recomputation.trials,
        "This promise does not cover your own layers that use a separate random generator or whose forward pass"
        " changes a state, devices other than the CPU and CUDA, or recomputation by other libraries.",
    ),
    Promise(
        11,
        "Memory budgets",
        "A run on a CPU with a memory budget (memory=) never exceeds this budget by more than 0.5 %. Either the run"
        " is rejected before any file is written, or its memory is within the budget from start to end. The peak"
        " memory in results.json is accurate to 1 %.",
        "The trials sample 60 runs (short form: 3) over tasks, networks, methods, batch sizes, evaluation batch"
        " sizes, image sizes up to 36 megapixels, and allocators. The budgets range from 3 % below to 15 % above the"
        " memory that the program reports as required. A different process reads the peak resident memory (VmHWM) of"
        " the run.",
        budgets.trials,
        "This promise does not cover GPUs, several processes, the memory of worker processes and of the page cache,"
        " or systems other than Linux. If the prediction for a run is too low, the run is stopped at its budget. In"
        " this case, the run can exceed the budget by the largest tensor of one operation.",
    ),
)
