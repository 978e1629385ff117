-- One batch: acks, checkpoints, releases, enqueues, claims, finishes, in this order. Follows jobs.lua.
--
-- The batch is atomic. Redis runs a script alone, with nothing in between, and writes what it
-- changed to the append-only file as one transaction, of which a restart takes all or nothing. What
-- may be refused is refused by the script's first write (of begin_write, or of a counter), before
-- any job has changed; the commands after it are such as cannot fail, as all keys that they need are
-- what they should be.
--
-- Arguments: token, lease in ms, '1' if there are enqueues; how many queues and priorities the
-- batch has to do with, and of each which keys: states of sets, b or u for a lean queue's hashes and
-- x for its runs, k, v, y, z and c for options; now_ms, most characters of a status; '1' if the keys
-- of new jobs are known to be free; how many queues there are with new jobs that have options, and
-- of each its name, which of the jobs that are enqueued to it has the first, and how many runs: of a
-- run how many jobs, their priority, '=' if they have keys, '*' if keys of all queues, '' if none,
-- their expiry in ms or '', their times in microseconds as plz_ has them or '', and the keys; how
-- many queues it enqueues to, and of each how many jobs; then of each kind how many, and each as it
-- is read below. Returns OK and of each kind a table of results; or DAMAGED, or OK and HELD if a key
-- may be held, and then no job has changed. Positions count from 1.

local problem = begin_write(ARGV[5] == '1')
if problem then
  return problem
end
taken = taken + 1
for _ = 1, take_number() do
  local queue, priority, kinds = take(), take(), take()
  for at = 1, #kinds do
    local kind = string.sub(kinds, at, at)
    if kind <= FAILED then
      problem = damage(set_key(queue, priority, kind), 'zset')
    elseif kind == 'x' then
      problem = damage(runs_key(queue, priority), 'zset')
    elseif kind == 'c' then
      problem = damage(checks_key(queue), 'zset')
    else
      problem = damage('pl' .. kind .. '_' .. SHARD .. '_' .. queue, 'hash')
    end
    if problem then
      return problem
    end
  end
end
local now, status_chars = take_number(), take_number()
-- Options of the last jobs that are enqueued to a queue.
local are_free, optional = take() == '1', {}
for at = 1, take_number() do
  local queue, before, runs = take(), take_number(), {}
  for nth = 1, take_number() do
    local run = { size = take_number(), priority = take(), mark = take(), expiry = take(), exact = take() }
    if run.mark ~= '' then
      run.keys = take_all(run.size)
      run.holders = holders_key(run.mark == '*' and '' or queue)
      local held = are_free and {} or redis.call('HMGET', run.holders, unpack(run.keys))
      for _, holder in ipairs(held) do
        if holder then
          return { 'OK', 'HELD' }
        end
      end
    end
    runs[nth] = run
  end
  optional[at] = { queue = queue, before = before, runs = runs }
end
-- The last ids given before, by queue. This may be the first write.
local last_ids = {}
for _ = 1, take_number() do
  local queue, total = take(), take_number()
  local counter = counter_key(queue)
  local last = redis.pcall('INCRBY', counter, total)
  if type(last) == 'table' and not string.find(last.err, '^-?ERR') then
    return damage(counter, 'string') or { 'REFUSED', last.err }
  end
  if type(last) == 'table' or last < total or last > MOST_EXACT / 2 then
    if type(last) == 'number' then
      redis.call('DECRBY', counter, total) -- or it would come to ids that were given before
    end
    return { 'DAMAGED', counter, 'what is no id', 'the last id given' }
  end
  last_ids[queue] = last - total
  if last == total then -- it was evicted
    last_ids[queue] = unused_id(queue, now)
    redis.call('SET', counter, string.format('%d', last_ids[queue] + total))
  end
end
local acks, checkpoints, releases, enqueues, claims, expired, finishes = {}, {}, {}, {}, {}, {}, {}
local jobs -- made when something needs it

-- Acks of a queue and priority, alike but in their ids, none of which is there twice: when those
-- that failed are due again (negative: never), or '' if they succeeded; a text that takes the old status' place, as
-- PinLater's does here; whether each names its claim; ranges of jobs, whose ids count up. Results:
-- the positions of those that did not apply and, negative, of those that failed for good.
local count = take_number()
if count > 0 then
  -- Jobs of a lean queue.
  local function succeed_runs(queue, priority, ranges, named, text, missed)
    local runs = runs_of(queue, priority)
    local evicted = redis.call('EXISTS', jobs_key(queue)) == 0

    -- Note the texts of a piece; pieces of it without jobs that were evicted.
    local function with_text(piece)
      local noted = {}
      for id = piece.first, piece.last do
        local name = string.format('%d', id)
        local job = jobs.read(queue, name, false)
        if job then
          jobs.change(queue, name, job, { ua = now, cs = text })
          noted[#noted + 1] = part(piece, id, id)
        end
      end
      return noted
    end

    for _, range in ipairs(ranges) do
      local behind = range.first -- the last one that applied
      local function miss(first, last)
        for nth = first - range.first + 1, last - range.first + 1 do
          missed[#missed + 1] = range.before + nth
        end
      end
      for _, piece in ipairs(runs.cut(range.first, range.last, IN_PROGRESS)) do
        local number = range.number and range.number + (piece.first - range.first)
        if named and not (piece.claimer == range.claimer and piece.number == number) then
          runs.put(piece)
        elseif not evicted then
          for _, ended in ipairs(text ~= '' and with_text(piece) or { piece }) do
            miss(behind, ended.first - 1)
            ended.state, ended.ms = SUCCEEDED, now
            runs.put(ended)
            behind = ended.last + 1
          end
        end
      end
      miss(behind, range.last)
    end
  end

  local ended_at = string.format('%.3f', now / 1000)

  -- Note the end of a job of PinLater's layout; false if it was evicted.
  local function note_end(key, text)
    local added = redis.pcall('HSET', key, 'ua', ended_at)
    if type(added) == 'table' then
      return false -- no hash
    end
    if added == 1 and redis.call('HLEN', key) == 1 then
      redis.call('DEL', key) -- all of ours have that field: there was none
      return false
    end
    if text ~= '' then
      redis.call('HSET', key, 'cs', text)
    end
    return true
  end

  local function succeed(queue, priority, ranges, named, text, missed)
    local ids, names = ids_of(ranges), claims_of(ranges)
    local running = set_key(queue, priority, IN_PROGRESS)
    local held, ended = redis.call('ZMSCORE', running, unpack(ids)), {}
    local prefix, known_score, digits, ms, is_ours = job_key(queue, ''), nil, nil, nil, nil
    for at = 1, #ids do
      local id, score, key = ids[at], held[at], prefix .. ids[at]
      local noted = score and named and redis.pcall('HGET', key, 'cd')
      local applies = score and (not named or noted == names[at])
      if applies and note_end(key, text) then
        ended[#ended + 1] = id
        if score ~= known_score or #id ~= digits then -- mostly many were claimed together
          known_score, digits, ms = score, #id, ms_of(queue, score)
          is_ours = score_of(queue, ms, digits) == tonumber(score)
        end
        if not is_ours then
          -- A job that PinLater claimed gets the run-after that its score stood for.
          redis.call('HSETNX', key, 'ra', ms)
        end
      else
        missed[#missed + 1] = at
        if
          applies or (score and type(noted) ~= 'string' and redis.call('EXISTS', key) == 0)
        then
          redis.call('ZREM', running, id) -- evicted
        end
      end
    end
    if #ended > 0 then
      redis.call('ZREM', running, unpack(ended))
      add_all(set_key(queue, priority, SUCCEEDED), queue, now, ended)
    end
  end

  local function fail(queue, priority, ranges, _, text, missed, retry_ms)
    local names = claims_of(ranges)
    for at, id in ipairs(ids_of(ranges)) do
      local job = jobs.take_held(queue, priority, id, names[at])
      local status = job and (text == '' and job.cs or text)
      if not job then
        missed[#missed + 1] = at
      else
        if retry_ms < 0 then
          job.ar = 1 -- no further attempt follows
        end
        if not jobs.fail(queue, priority, id, job, retry_ms, status, now) then
          missed[#missed + 1] = -at
        end
      end
    end
  end

  for run = 1, count do
    local queue, priority, retry_ms = take(), take(), take_number()
    local text, named = take(), take() == '1'
    local ranges, missed = take_ranges(named), {}
    if retry_ms or text ~= '' then
      jobs = jobs or open_jobs()
    end
    local finish = retry_ms and fail or (is_lean(queue) and succeed_runs or succeed)
    finish(queue, priority, ranges, named, text, missed, retry_ms)
    acks[run] = missed
  end
end

-- A checkpoint: queue, priority, id, source, run-after in ms, body or none, '1' if it goes back to
-- PENDING, attempts or none, text, claim or none. Result: 1 if it applied, else 0.
count = take_number()
if count > 0 then
  jobs = jobs or open_jobs()

  -- nil for '-', else what follows '='
  local function take_optional()
    local value = take()
    return value ~= '-' and string.sub(value, 2) or nil
  end

  for at = 1, count do
    local queue, priority, id, source = take(), take(), take(), take()
    local run_after, body, to_pending = take_number(), take_optional(), take() == '1'
    local attempts, text, claim = take_optional(), take(), take_optional()
    local job = jobs.take_held(queue, priority, id, claim, source)
    if not job then
      checkpoints[at] = 0
    else
      checkpoints[at] = 1
      local changes = { ra = run_after, ua = now, bd = body, al = attempts, ar = attempts }
      if text ~= '' then
        changes.cs = jobs.cut(text .. job.cs, status_chars)
      end
      jobs.change(queue, id, job, changes)
      if to_pending then
        jobs.enter(queue, priority, id, PENDING, run_after)
      else
        jobs.enter(queue, priority, id, IN_PROGRESS, now, job.cd)
      end
    end
  end
end

-- A release: queue, priority, id, claim. Result: the run-after that the job has again, or false.
for at = 1, take_number() do
  jobs = jobs or open_jobs()
  local queue, priority, id, claim = take(), take(), take(), take()
  local job = jobs.take_held(queue, priority, id, claim)
  if job then
    jobs.enter(queue, priority, id, PENDING, job.ra)
  end
  releases[at] = job and job.ra or false
end

-- Enqueues to a queue: how many runs. A run: how many, priority, run-after in ms, attempts, status;
-- then bodies, in a lean queue what plb_ holds. Result: the id of the first job; the others follow.
for at = 1, take_number() do
  local queue = take()
  local lean, last = is_lean(queue), last_ids[queue]
  enqueues[at] = last + 1
  for _ = 1, take_number() do
    local size, priority, run_after = take_number(), take(), take()
    local attempts, status = take(), take()
    local ids, records = {}, {}
    for nth = 1, size do
      ids[nth] = string.format('%d', last + nth)
      if lean then
        records[2 * nth - 1], records[2 * nth] = ids[nth], ARGV[taken + nth]
      end
    end
    if lean then
      redis.call('HSET', jobs_key(queue), unpack(records))
    else
      local prefix, now_seconds = job_key(queue, ''), string.format('%.3f', now / 1000)
      for nth = 1, size do
        redis.call(
          'HSET', prefix .. ids[nth], 'bd', ARGV[taken + nth], 'cs', status, 'ca', now_seconds,
          'ua', now_seconds, 'al', attempts, 'ar', attempts, 'ra', run_after
        )
      end
    end
    add_all(set_key(queue, priority, PENDING), queue, tonumber(run_after), ids)
    taken, last = taken + size, last + size
  end
end

-- The options of jobs that are stored by now.
for _, of_queue in ipairs(optional) do
  local queue = of_queue.queue
  local last = last_ids[queue] + of_queue.before
  for _, run in ipairs(of_queue.runs) do
    local keys, holders, names, expiries, checks, exact = run.keys, {}, {}, {}, {}, {}
    local place, behind = run.priority .. ' ', run.mark == '*' and ' ' .. queue or ''
    for nth = 1, run.size do
      local id, at = string.format('%d', last + nth), 2 * nth
      if keys then
        holders[at - 1], holders[at] = keys[nth], place .. id .. behind
        names[at - 1], names[at] = id, run.mark .. keys[nth]
      end
      if run.expiry ~= '' then
        expiries[at - 1], expiries[at] = id, run.expiry
        checks[at - 1], checks[at] = run.expiry, place .. id
      end
      if run.exact ~= '' then
        exact[at - 1], exact[at] = id, run.exact
      end
    end
    if keys then
      redis.call('HSET', run.holders, unpack(holders))
      redis.call('HSET', keys_key(queue), unpack(names))
    end
    if run.expiry ~= '' then
      redis.call('HSET', expiries_key(queue), unpack(expiries))
      redis.call('ZADD', checks_key(queue), unpack(checks))
    end
    if run.exact ~= '' then
      redis.call('HSET', exact_key(queue), unpack(exact))
    end
    last = last + run.size
  end
end

-- Claims of a queue and priority: '1' if it may have jobs with an expiry; ranges of jobs, and their
-- claims. Results: the positions of those that were not made, as the job is not PENDING; and of
-- those of them whose job has failed now, since it has expired.
count = take_number()
if count > 0 then
  -- The ids of these jobs, if they are the first of a set, in its order; else nil. They mostly are:
  -- the ready index has the same order.
  local function first_ids(set, ranges, size)
    local first = redis.call('ZRANGE', set, 0, size - 1)
    if #first < size then
      return nil
    end
    for _, range in ipairs(ranges) do
      local at, digits = range.before + 1, #range.id
      local longer = 10 ^ digits
      if first[at] ~= range.id then
        return nil
      end
      for nth = 1, range.size - 1 do
        local member, id = first[at + nth], range.first + nth
        digits = id == longer and digits + 1 or digits
        if tonumber(member) ~= id or #member ~= digits then
          return nil
        end
      end
    end
    return first
  end

  -- Note the claims of jobs that are PENDING; false, and no job is claimed, if one is not there.
  local function note_lean(queue, priority, ranges)
    if redis.call('EXISTS', jobs_key(queue)) == 0 then
      return false
    end
    local runs = runs_of(queue, priority)
    for _, range in ipairs(ranges) do
      runs.cut(range.first, range.last) -- a hand may have made jobs PENDING that are in one
      range.state, range.ms = IN_PROGRESS, now
      runs.put(range)
    end
    return true
  end

  local function note_plain(queue, priority, ranges, ids)
    local prefix, keys, names = job_key(queue, ''), {}, claims_of(ranges)
    for at = 1, #ids do
      keys[at] = prefix .. ids[at]
    end
    if redis.call('EXISTS', unpack(keys)) < #keys then
      return false
    end
    for at = 1, #ids do
      if type(redis.pcall('HSET', keys[at], 'cd', names[at])) == 'table' then
        return false -- no job, but a hand's doing
      end
    end
    add_all(set_key(queue, priority, IN_PROGRESS), queue, now, ids)
    return true
  end

  for run = 1, count do
    local queue, priority, may_expire = take(), take(), take() == '1'
    local ranges, size = take_ranges(true)
    local pending, missed, past = set_key(queue, priority, PENDING), {}, {}
    if may_expire then
      jobs = jobs or open_jobs()
      for at, id in ipairs(ids_of(ranges)) do
        if jobs.expire(queue, priority, id, now, status_chars) then
          past[#past + 1] = at
        end
      end
    end
    local note = is_lean(queue) and note_lean or note_plain
    local ids = first_ids(pending, ranges, size)
    if ids and note(queue, priority, ranges, ids) then
      redis.call('ZREMRANGEBYRANK', pending, 0, size - 1)
    else
      for _, range in ipairs(ranges) do
        for nth, id in ipairs(ids_of({ range })) do
          local alone = part(range, range.first + nth - 1, range.first + nth - 1)
          alone.id, alone.size = id, 1
          if
            redis.call('ZREM', pending, id) == 0
            or not note(queue, priority, { alone }, { id })
          then
            missed[#missed + 1] = range.before + nth
          end
        end
      end
    end
    claims[run], expired[run] = missed, past
  end
end

-- A finish: queue, priority, id, state, attempts remaining from then on, those that are expected or
-- '', '1' if those of a PENDING job count, run-after if it is PENDING then, text. Result: a
-- FinishOutcome; -1 if it was done and the job was PENDING.
for at = 1, take_number() do
  jobs = jobs or open_jobs()
  local queue, priority, id, state = take(), take(), take(), take()
  local remaining, expected, compares_pending = take_number(), take_number(), take() == '1'
  local run_after, text = take_number(), take()
  local job, before, since = jobs.read(queue, id), nil, nil
  if is_lean(queue) then
    runs_of(queue, priority).flush() -- what has been put in is found then
  end
  for _, each in ipairs(job and { IN_PROGRESS, PENDING, SUCCEEDED, FAILED } or {}) do
    local ms, claim = jobs.since(queue, priority, id, each)
    if ms then
      before, since, job.cd = each, ms, claim or job.cd or ''
      break
    end
  end
  local is_compared = expected and (before == IN_PROGRESS or compares_pending)
  if not before then
    finishes[at] = 1
  elseif before == SUCCEEDED or before == FAILED then
    finishes[at] = 2
  elseif is_compared and expected ~= (job.ar or 1) then
    finishes[at] = 3
  else
    finishes[at] = before == PENDING and -1 or 0
    local changes = { ar = remaining, ua = now, ra = job.ra or since, cs = job.cs }
    if text ~= '' then
      changes.cs = text
    end
    jobs.leave(queue, priority, id, before)
    if state == PENDING then
      changes.ra = run_after
      jobs.enter(queue, priority, id, PENDING, run_after)
    else
      jobs.enter(queue, priority, id, state, now, job.cd)
    end
    jobs.change(queue, id, job, changes)
  end
end

flush_runs()
return { 'OK', acks, checkpoints, releases, enqueues, claims, expired, finishes }
