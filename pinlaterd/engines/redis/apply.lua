-- One batch: acks, checkpoints, releases, enqueues, claims, in this order. Follows jobs.lua.
--
-- The batch is atomic. Redis runs a script alone, with nothing in between, and writes what it
-- changed to the append-only file as one transaction, of which a restart takes all or nothing. What
-- may be refused is refused by the script's first write (of begin_write, or of a counter), before
-- any job has changed; the commands after it are such as cannot fail, as all keys that they need are
-- what they should be.
--
-- Arguments: token, lease in ms, '1' if there are enqueues; how many queues and priorities the
-- batch has to do with, and of each which keys: states of sets, and b, c or u for a lean queue's
-- hashes; now_ms, most characters of a status; how many queues it enqueues to, and of each how many
-- jobs; then of each kind how many, and each as it is read below. Returns OK and of each kind a
-- table of results; or DAMAGED, and then no job has changed. Positions count from 1.

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
    else
      problem = damage('pl' .. kind .. '_' .. SHARD .. '_' .. queue, 'hash')
    end
    if problem then
      return problem
    end
  end
end
local now, status_chars = take_number(), take_number()
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
    last_ids[queue] = unused_id(now)
    redis.call('SET', counter, string.format('%d', last_ids[queue] + total))
  end
end
local acks, checkpoints, releases, enqueues, claims = {}, {}, {}, {}, {}
local jobs -- made when something needs it

-- Acks of a queue and priority, alike but in their ids, none of which is there twice: when those
-- that failed are due again, or '' if they succeeded; a text that takes the old status' place, as
-- PinLater's does here; whether each names its claim; how many, their ids, their claims. Results:
-- the positions of those that did not apply and, negative, of those that failed for good.
local count = take_number()
if count > 0 then
  -- Note the end of a job that is IN_PROGRESS since `score`; false if it was evicted.
  local function note_end(queue, id, text, score)
    if is_lean(queue) then
      local job = jobs.read(queue, id, false)
      if job then
        jobs.change(queue, id, job, { ua = now, cs = text })
      end
      return job
    end
    local key, ms = job_key(queue, id), ms_of(queue, score)
    local added = redis.pcall('HSET', key, 'ua', string.format('%.3f', now / 1000))
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
    if score_of(queue, ms, #id) ~= tonumber(score) then
      -- A job that PinLater claimed gets the run-after that its score stood for.
      redis.call('HSETNX', key, 'ra', ms)
    end
    return true
  end

  local function claims_of(queue, ids)
    if is_lean(queue) then
      return redis.call('HMGET', claims_key(queue), unpack(ids))
    end
    local found = {}
    for at = 1, #ids do
      found[at] = redis.pcall('HGET', job_key(queue, ids[at]), 'cd')
    end
    return found
  end

  local function succeed(queue, priority, ids, names, text, missed)
    local running = set_key(queue, priority, IN_PROGRESS)
    local held, noted = redis.call('ZMSCORE', running, unpack(ids)), names and claims_of(queue, ids)
    local evicted = is_lean(queue) and redis.call('EXISTS', jobs_key(queue)) == 0
    local noteworthy, ended, count_ended = text ~= '' or not is_lean(queue), {}, 0
    for at = 1, #ids do
      local id, score = ids[at], held[at]
      local applies = score and (not names or noted[at] == names[at])
      local ends = applies and not evicted
      if ends and (not noteworthy or note_end(queue, id, text, score)) then
        count_ended = count_ended + 1
        ended[count_ended] = id
      else
        missed[#missed + 1] = at
        local gone = applies
        if score and not applies and type(noted[at]) ~= 'string' then -- it may be for this
          gone = evicted or (not is_lean(queue) and redis.call('EXISTS', job_key(queue, id)) == 0)
        end
        if gone then
          redis.call('ZREM', running, id) -- evicted
        end
      end
    end
    if #ended > 0 then
      redis.call('ZREM', running, unpack(ended))
      add_all(set_key(queue, priority, SUCCEEDED), queue, now, ended)
    end
  end

  local function fail(queue, priority, ids, names, text, missed, retry_ms)
    for at, id in ipairs(ids) do
      local job = jobs.held(queue, priority, id, names and names[at])
      local status = job and (text == '' and job.cs or text)
      if not job then
        missed[#missed + 1] = at
      elseif not jobs.fail(queue, priority, id, job, retry_ms, status, now) then
        missed[#missed + 1] = -at
      end
    end
  end

  for run = 1, count do
    local queue, priority, retry_ms = take(), take(), take_number()
    local text, named, size = take(), take() == '1', take_number()
    local ids, missed = take_all(size), {}
    local names = named and take_all(size) or nil
    if retry_ms or text ~= '' then
      jobs = jobs or open_jobs()
    end
    local finish = retry_ms and fail or succeed
    finish(queue, priority, ids, names, text, missed, retry_ms)
    acks[run] = missed
  end
end

-- A checkpoint: queue, priority, id, source, run-after in ms, body or none, '1' if it goes back to
-- PENDING, attempts or none, text, claim or none. Result: 1 if it applied, else 0.
count = take_number()
if count > 0 then
  jobs = jobs or open_jobs()

  local function cut(text)
    local chars = 0
    for at = 1, #text > status_chars and #text or 0 do
      local byte = string.byte(text, at)
      if byte < 128 or byte > 191 then -- the first byte of a character in UTF-8
        chars = chars + 1
        if chars > status_chars then
          return string.sub(text, 1, at - 1)
        end
      end
    end
    return text
  end

  -- nil for '-', else what follows '='
  local function take_optional()
    local value = take()
    return value ~= '-' and string.sub(value, 2) or nil
  end

  -- The source in HOST:PORT:STARTMILLIS:SOURCE:COUNTER; nil if it is not of that form.
  local function claim_source(claim)
    return string.match(claim, '^[^:]*:[^:]*:[^:]*:(.*):[^:]*$')
  end

  for at = 1, count do
    local queue, priority, id, source = take(), take(), take(), take()
    local run_after, body, to_pending = take_number(), take_optional(), take() == '1'
    local attempts, text, claim = take_optional(), take(), take_optional()
    local job = jobs.held(queue, priority, id, claim)
    if not job or (claim == nil and claim_source(job.cd) ~= source) then
      checkpoints[at] = 0
    else
      checkpoints[at] = 1
      local changes = { ra = run_after, ua = now, bd = body, al = attempts, ar = attempts }
      if text ~= '' then
        changes.cs = cut(text .. job.cs)
      end
      jobs.change(queue, id, job, changes)
      if to_pending then
        jobs.unclaim(queue, id)
        jobs.move(queue, priority, id, IN_PROGRESS, PENDING, run_after)
      else
        add_all(set_key(queue, priority, IN_PROGRESS), queue, now, { id })
      end
    end
  end
end

-- A release: queue, priority, id, claim. Result: the run-after that the job has again, or false.
for at = 1, take_number() do
  jobs = jobs or open_jobs()
  local queue, priority, id, claim = take(), take(), take(), take()
  local job = jobs.held(queue, priority, id, claim)
  if job then
    jobs.unclaim(queue, id)
    jobs.move(queue, priority, id, IN_PROGRESS, PENDING, job.ra)
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

-- Claims of a queue and priority: how many, ids, claims. Result: the positions of those that were
-- not made, as the job is not PENDING.
count = take_number()
if count > 0 then
  -- Whether these ids are the first of a set, in its order. They mostly are: the ready index has
  -- the same order.
  local function are_first(set, ids)
    local first = redis.call('ZRANGE', set, 0, #ids - 1)
    for at = 1, #ids do
      if first[at] ~= ids[at] then
        return false
      end
    end
    return true
  end

  -- Note the claims of jobs that are PENDING; false, and no job is claimed, if one is not there.
  local function note_lean(queue, ids, names)
    if redis.call('EXISTS', jobs_key(queue)) == 0 then
      return false
    end
    local fields = {}
    for at = 1, #ids do
      fields[2 * at - 1], fields[2 * at] = ids[at], names[at]
    end
    redis.call('HSET', claims_key(queue), unpack(fields))
    return true
  end

  local function note_plain(queue, ids, names)
    local prefix, keys = job_key(queue, ''), {}
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
    return true
  end

  for run = 1, count do
    local queue, priority, size = take(), take(), take_number()
    local ids, names, missed = take_all(size), take_all(size), {}
    local pending = set_key(queue, priority, PENDING)
    local running = set_key(queue, priority, IN_PROGRESS)
    local note = is_lean(queue) and note_lean or note_plain
    if are_first(pending, ids) and note(queue, ids, names) then
      redis.call('ZREMRANGEBYRANK', pending, 0, size - 1)
      add_all(running, queue, now, ids)
    else
      for at, id in ipairs(ids) do
        local made = redis.call('ZSCORE', pending, id) and note(queue, { id }, { names[at] })
        redis.call('ZREM', pending, id)
        if made then
          add_all(running, queue, now, { id })
        else
          missed[#missed + 1] = at
        end
      end
    end
    claims[run] = missed
  end
end

return { 'OK', acks, checkpoints, releases, enqueues, claims }
