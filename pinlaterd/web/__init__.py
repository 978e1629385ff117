"""The dashboard: a process of its own that shows the service in a browser, and mends it.

    main         `pinlaterd web`: wires these together, and lists the pages
    site         what every page has: its frame, its rights, its forms
    rendering    templates, and the files that they load
    refusals     requests that are not carried out: why, and what to do about it
    sessions     who has logged in
    live         what is known of the service now, and the stream of what has changed
    text         figures as people read them
    bodies       bodies of jobs as JSON, text or bytes, with nothing hidden
    overview, queue, failures, workers, system, find, job, history, guide, login
                 a page each
    mend         the pages that show a change, make it, and list all changes
    selections   the jobs that a change is for, as forms and words name them
    operations   retries and deletes of many jobs, done in batches
    trash        the jobs that were deleted, with their bodies, for a day
    audit        the log of who changed what
    commands     the calls of pinlater-admin at run/web.sock

To add a page, write a module with `routes(site)` and a template, and add the module to PAGES in
main. `routes` returns what `site.page(path, handler)` gives for a page, and `site.action(path,
handler)` for a form that is posted; both check the user's rights for the `{queue}` in the path.
A handler ends with `site.render(request, "NAME.html", …)`; its template extends base.html. Texts
that change are cells: `data-cell="KEY"` in the template, and a source of the same keys by
`site.live.add`.
"""
