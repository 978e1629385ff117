"""The deployment's files: what may stand in them, reading them, and where everything lies.

    schema        names, units, defaults and limits of all settings
    allowed       rules of what values a setting may have, and the words that say so
    load          the files of etc/ to a Config
    document      a file as nodes that know their place, and checks of what they hold
    edit          edits of files by commands, `/v2` and the dashboard
    edit_text     changes of a text that leave all else as it stands
    active        the active configuration: what was validated last
    kinds         the kinds of process that a deployment runs
    layout        where the files of a deployment lie
    password      the admin password, as a salted hash
    push_hosts    the hosts that jobs may be pushed to
    ticket        files by which a process shows its router that a queue may be deleted

The only package that knows YAML.
"""
