"""Wrong command lines."""

from slamb_jax import command_line


def command(text):
    return lambda: command_line.main(text.split())


ADVISE = "advise --params 1M --workers 8 --link 1Gbit --step 1s "


COMMANDS = [
    (command(""), "arguments are required: command"),
    (command("average"), "invalid choice: 'average'"),
    (command("advise --params 1M"), "required: --workers, --link, --step"),
    (command(ADVISE + "--params lots"), "--params: .*'lots'"),
    (command(ADVISE + "--workers many"), "--workers: .*'many'"),
    (command(ADVISE + "--link 10"), "--link: must be a rate such as .*, got '10'"),
    (command(ADVISE + "--lin 10Gbit"), "unrecognized arguments: --lin 10Gbit"),
    (command(ADVISE + "--step 5"), "--step: .*'5'"),
    (command(ADVISE + "--budget 0.05%"), "budget must be at least 0.00.*outer"),
    (command(ADVISE + "--budget five"), "a share such as 5% or 0.05, .*got 'five'"),
    (command(ADVISE + "--budget 101%"), "--budget: must be a share .*got '101%'"),
    (command(ADVISE + "--budget 0"), "--budget: must be a share .*got '0'"),
    (command(ADVISE + "--budget 5% --payload null"), "chooses the payload.*None"),
    (command(ADVISE + "--overlap 3"), "unrecognized arguments: 3"),
]
