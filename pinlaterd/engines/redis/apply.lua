-- One batch: acks, checkpoints, releases, enqueues, claims, in this order, each in its turn.
--
-- The batch is atomic. Redis runs a script alone, with nothing in between, and writes what it
-- changed to the append-only file as one transaction, of which a restart takes all or nothing. What
-- may be refused is refused by the script's first write (begin_write), before anything has changed;
-- the commands after it are such as cannot fail, unless a foreign writer put something else under our
-- keys.
--
-- Arguments: the shard, token, lease in ms, '1' if there are enqueues, now_ms, the latest run-after
-- in ms, most characters of a status; then of each kind how many ops, and of each op its queue and
-- what batch.py writes there. In front of the time: how many queues and priorities the batch has to
-- do with, and these, and how many queues it enqueues to, and these. Returns OK and, of each kind,
-- the ops' results; or DAMAGED, and then it has written nothing.

local problem = begin_write(ARGV[4] == '1')
if problem then
  return problem
end
take()
for _ = 1, take_number() do
  problem = damaged_set(take(), take())
  if problem then
    return problem
  end
end
for _ = 1, take_number() do
  local counter = counter_key(take())
  local last = redis.pcall('GET', counter)
  if type(last) == 'table' then
    return damage(counter, 'string')
  end
  if last and not (string.find(last, '^[0-9]+$') and number_in(last, 0, MOST_EXACT / 2)) then
    return { 'DAMAGED', counter, 'what is no id', 'the last id given' }
  end
end
local now, latest_ms, status_chars = take_number(), take_number(), take_number()
local now_seconds = seconds(now)
local score_now = scorer(now)

-- The next `count` arguments.
local function take_all(count)
  local values = {}
  for at = 1, count do
    values[at] = ARGV[taken + at]
  end
  taken = taken + count
  return values
end

local function each_op(apply_one)
  local results = {}
  for at = 1, take_number() do
    results[at] = apply_one(take())
  end
  return results
end

local function requeue(results, priority, id, run_after)
  results[#results + 1] = priority
  results[#results + 1] = id
  results[#results + 1] = run_after
end

-- --- acks -------------------------------------------------------------------------------------
-- Of each op: runs that succeeded, runs that failed. A run: how many, priority, text, delay in ms,
-- '1' if each names its claim; then ids; then those claims.

local function held_by(queue, priority, id, claim)
  local job = held_claim(queue, priority, id)
  if job and (claim == nil or job.claim == claim) then
    return job
  end
  return nil
end

-- Note the end of a job in its hash; false if there is none, or it is not held by `claim`.
local function note_success(key, text, claim)
  if claim ~= nil and redis.pcall('HGET', key, 'cd') ~= claim then
    return false
  end
  local added = redis.pcall('HSET', key, 'ua', now_seconds)
  if added ~= 0 and not is_left(key, added) then
    return false
  end
  if text ~= '' then
    -- As PinLater does here: the text of an ack replaces what was there.
    redis.call('HSET', key, 'cs', cut(text, status_chars))
  end
  return true
end

-- Those of `ids` that end, as they are held by their claims, and not evicted; what their hashes say of
-- the end is written.
local function ending(queue, running, ids, text, claims)
  local prefix, held = job_key(queue, ''), scores_of(running, ids)
  local ended, ours = {}, {}
  for at = 1, #ids do
    local id, score = ids[at], held[at]
    if score then
      local key = prefix .. id
      if ours[score] == nil then
        ours[score] = score_of(ms_of(score), id) == tonumber(score)
      end
      if note_success(key, text, claims[at]) then
        if not ours[score] then
          -- A job that PinLater claimed gets the run-after that its score stood for.
          redis.call('HSETNX', key, 'ra', ms_of(score))
        end
        ended[#ended + 1] = id
      elseif redis.call('TYPE', key).ok ~= 'hash' then
        redis.call('ZREM', running, id) -- evicted
      end
    end
  end
  return ended
end

-- The claim in what plc_ holds.
local function claim_in(noted)
  return noted and string.match(noted, ' (.*)$')
end

local function ending_lean(queue, running, ids, text, claims)
  if redis.call('EXISTS', jobs_key(queue)) == 0 then
    remove_all(running, ids) -- evicted
    return {}
  end
  local held, named = scores_of(running, ids), #claims > 0
  local noted = named and texts_of(claims_key(queue), ids) or {}
  local ended = {}
  for at = 1, #ids do
    local id = ids[at]
    if held[at] and (not named or claims[at] == claim_in(noted[at])) then
      if text ~= '' then
        change_job(queue, id, { ua = now, cs = cut(text, status_chars) }, false)
      end
      ended[#ended + 1] = id
    end
  end
  return ended
end

-- Returns how many did. What is the same for all is done once for all.
local function succeed(queue, priority, ids, text, claims)
  local running = set_key(queue, priority, IN_PROGRESS)
  local ended = (is_lean(queue) and ending_lean or ending)(queue, running, ids, text, claims)
  local scores = {}
  for at, id in ipairs(ended) do
    scores[2 * at - 1], scores[2 * at] = score_now[#id], id
  end
  add_all(set_key(queue, priority, SUCCEEDED), scores)
  return remove_all(running, ended) -- one that is given twice ends once
end

-- Returns how many did; adds to `requeued` those that are PENDING again.
local function fail(queue, priority, ids, text, claims, delay, requeued)
  local retry_ms = math.min(now + delay, latest_ms)
  local ended = 0
  for at, id in ipairs(ids) do
    local job = held_by(queue, priority, id, claims[at])
    if job then
      local status = text == '' and job.status or cut(text, status_chars)
      if fail_attempt(job, queue, priority, retry_ms, status, now) then
        requeue(requeued, priority, id, retry_ms)
      end
      ended = ended + 1
    end
  end
  return ended
end

-- How many of all runs did what `end_run` does, and how many did not.
local function each_run(end_run)
  local done, all = 0, 0
  for _ = 1, take_number() do
    local count, priority, text = take_number(), take(), take()
    local delay, named = take_number(), take() == '1'
    local ids = take_all(count)
    local claims = named and take_all(count) or {}
    done = done + end_run(priority, ids, text, claims, delay)
    all = all + count
  end
  return done, all - done
end

local acks = each_op(function(queue)
  local result = { 0, 0, 0 }
  local succeeded, not_succeeded = each_run(function(priority, ids, text, claims)
    return succeed(queue, priority, ids, text, claims)
  end)
  local failed, not_failed = each_run(function(priority, ids, text, claims, delay)
    return fail(queue, priority, ids, text, claims, delay, result)
  end)
  result[1], result[2], result[3] = succeeded, failed, not_succeeded + not_failed
  return result
end)

-- --- checkpoints ------------------------------------------------------------------------------
-- Of each op: source, how many. Of each checkpoint: priority, id, run-after in ms, body or none,
-- '1' if it goes back to PENDING, attempts or none, text, claim or none.

-- The source in HOST:PORT:STARTMILLIS:SOURCE:COUNTER; nil if it is not of that form.
local function claim_source(claim)
  return string.match(claim, '^[^:]*:[^:]*:[^:]*:(.*):[^:]*$')
end

local checkpoints = each_op(function(queue)
  local source, result = take(), { 0, 0 }
  for _ = 1, take_number() do
    local priority, id, run_after, body = take(), take(), take_number(), take_optional()
    local to_pending, attempts = take() == '1', take_optional()
    local text, claim = take(), take_optional()
    local job = held_by(queue, priority, id, claim)
    if not job or (claim == nil and claim_source(job.claim) ~= source) then
      result[2] = result[2] + 1
    else
      result[1] = result[1] + 1
      local changes = { ra = run_after, ua = now, bd = body, al = attempts, ar = attempts }
      if text ~= '' then
        changes.cs = cut(text .. job.status, status_chars)
      end
      change_job(queue, id, changes, to_pending)
      if to_pending then
        redis.call('ZREM', job.running, id)
        redis.call('ZADD', set_key(queue, priority, PENDING), score_of(run_after, id), id)
        requeue(result, priority, id, run_after)
      else
        redis.call('ZADD', job.running, score_of(now, id), id)
      end
    end
  end
  return result
end)

-- --- releases ---------------------------------------------------------------------------------
-- Of each op: how many. Of each release: priority, id, claim.

local releases = each_op(function(queue)
  local result = {}
  for _ = 1, take_number() do
    local priority, id, claim = take(), take(), take()
    local job = held_by(queue, priority, id, claim)
    if job then
      release_job(queue, id)
      redis.call('ZREM', job.running, id)
      redis.call('ZADD', set_key(queue, priority, PENDING), score_of(job.run_after, id), id)
      requeue(result, priority, id, job.run_after)
    end
  end
  return result
end)

-- --- enqueues ---------------------------------------------------------------------------------
-- Of each queue: how many jobs, how many runs. A run: how many, priority, run-after in ms, attempts,
-- status; then bodies, in a lean queue what plb_ holds. The result: the id of the first job; the
-- others follow.

local enqueues = each_op(function(queue)
  local jobs, runs = take_number(), take_number()
  local counter, prefix, lean = counter_key(queue), job_key(queue, ''), is_lean(queue)
  local number = redis.call('INCRBY', counter, jobs) - jobs
  if number == 0 then -- it was evicted
    number = unused_id(now)
    redis.call('SET', counter, id_text(number + jobs))
  end
  local first = number + 1
  for _ = 1, runs do
    local count, priority, run_after = take_number(), take(), take()
    local attempts, status = take(), take()
    local scores, score, records = {}, scorer(tonumber(run_after)), {}
    for at = 1, count do
      number = number + 1
      local id, body = id_text(number), ARGV[taken + at]
      scores[2 * at - 1], scores[2 * at] = score[#id], id
      if lean then
        records[2 * at - 1], records[2 * at] = id, body
      else
        redis.call(
          'HSET', prefix .. id, 'bd', body, 'cs', status, 'ca', now_seconds, 'ua', now_seconds,
          'al', attempts, 'ar', attempts, 'ra', run_after
        )
      end
    end
    taken = taken + count
    call_with_all('HSET', jobs_key(queue), records)
    add_all(set_key(queue, priority, PENDING), scores)
  end
  return first
end)

-- --- claims -----------------------------------------------------------------------------------
-- In front of the ops: most bytes of the batch, bytes of a job beside its body. Of each op: most
-- bytes, '1' if its first job counts as within them, how many runs. A run: how many, priority, what
-- its jobs take if their payloads are known, or ''; then ids, then claims, in a lean queue what plc_
-- holds. The result of an op is
-- that of its runs: how many jobs, if all were claimed and their payloads are known; else a table
-- of three for each: body, attempts allowed and remaining, or nothing if it is not PENDING; in a lean
-- queue what plb_ and plu_ hold, and nothing. That ends before the first job that does not fit: it and those behind it in the op are left alone.

local room, job_bytes = take_number(), take_number()
local claimed_any = false
local NOTHING = { false, false, false }

-- Whether so many bytes more have room in the answer, and in the batch; then they are taken.
local function fits(answer, bytes)
  if bytes > answer.left and not answer.at_least_one then
    return false
  end
  if bytes > room and claimed_any then
    return false
  end
  answer.left, answer.at_least_one = answer.left - bytes, false
  room, claimed_any = room - bytes, true
  return true
end

-- Whether these ids are the first of a set, in its order. They mostly are: the ready index has the
-- same order.
local function are_first(set, ids)
  local first = redis.call('ZRANGE', set, 0, #ids - 1)
  for at = 1, #ids do
    if first[at] ~= ids[at] then
      return false
    end
  end
  return true
end

-- Note the claims of jobs of which nothing has to be read; false if one of them is not there.
local function note_claims(run)
  local keys = {}
  for at, id in ipairs(run.ids) do
    keys[at] = run.prefix .. id
  end
  if call_with_all('EXISTS', nil, keys) < #keys then
    return false
  end
  for at, key in ipairs(keys) do
    local added = redis.pcall('HSET', key, 'cd', run.claims[at])
    if type(added) == 'table' then -- no job, but a hand's doing: see below
      return false
    end
  end
  return true
end

-- Claim jobs that all are PENDING, the first of their set, and of which nothing has to be read; false
-- if one of them is not there.
local function claim_known(run)
  if run.lean then
    if redis.call('EXISTS', jobs_key(run.queue)) == 0 then
      return false
    end
    local records = {}
    for at, id in ipairs(run.ids) do
      records[2 * at - 1], records[2 * at] = id, run.claims[at]
    end
    call_with_all('HSET', claims_key(run.queue), records)
  elseif not note_claims(run) then
    return false
  end
  local scores = {}
  for at, id in ipairs(run.ids) do
    scores[2 * at - 1], scores[2 * at] = score_now[#id], id
  end
  redis.call('ZREMRANGEBYRANK', run.pending, 0, #run.ids - 1)
  add_all(run.running, scores)
  return true
end

-- What plb_ holds of a job of a lean queue. Some jobs are read at a time: so what is in memory are a
-- few bodies more than fit, or one more if they are large.
local READ_AT_ONCE, LARGE_BYTES = 16, 65536

local function lean_record(run, at)
  if at > run.read then
    local last = math.min(at + run.read_at_once - 1, #run.ids)
    run.records = redis.call('HMGET', run.jobs, unpack(run.ids, at, last))
    run.before, run.read = at - 1, last
  end
  local record = run.records[at - run.before]
  run.read_at_once = record and #record > LARGE_BYTES and 1 or READ_AT_ONCE
  return record
end

-- What a claim of a job hands out, and the bytes of its body; nil if it was evicted.
local function read_job(run, at)
  local id = run.ids[at]
  if run.lean then
    local record = lean_record(run, at)
    if not record then
      return nil
    end
    local status_bytes, begin = string.match(record, '^%d+ %-?%d+ (%d+);()')
    local update = run.updates and text_in(run.updates, id)
    local bytes = #record - (begin or 1) + 1 - (status_bytes or 0)
    return { record, update or false, false }, math.max(0, bytes)
  end
  local job = fields_of(run.prefix .. id, 'bd', 'al', 'ar', 'ra')
  if job then
    job[1] = job[1] or ''
  end
  return job, job and #job[1]
end

-- In PinLater's layout; in a lean queue those of a run are noted at once.
local function note_claim(run, id, claim, job)
  local key = run.prefix .. id
  if job[4] then
    redis.call('HSET', key, 'cd', claim)
  else -- PinLater's
    redis.call('HSET', key, 'cd', claim, 'ra', ms_of(redis.call('ZSCORE', run.pending, id)))
  end
end

-- Adds to `results`, up to the first job that does not fit; returns whether all did.
local function claim_and_read(run, answer, in_order, results)
  local ready = not in_order and scores_of(run.pending, run.ids)
  local met, scores, records, seen, all_fit = {}, {}, {}, {}, true
  for at, id in ipairs(run.ids) do
    local found = NOTHING
    if in_order or (ready[at] and not seen[id]) then
      local job, bytes = read_job(run, at)
      if job and not fits(answer, bytes + job_bytes) then
        all_fit = false
        break
      end
      met[#met + 1], seen[id] = id, true -- an evicted one goes, too
      if job then
        found = job
        local last = #scores + 2
        scores[last - 1], scores[last] = score_now[#id], id
        if run.lean then
          records[last - 1], records[last] = id, run.claims[at]
        else
          note_claim(run, id, run.claims[at], job)
        end
      end
    end
    results[3 * at - 2], results[3 * at - 1], results[3 * at] = found[1], found[2], found[3]
  end
  call_with_all('HSET', claims_key(run.queue), records)
  if in_order and #met > 0 then
    redis.call('ZREMRANGEBYRANK', run.pending, 0, #met - 1)
  else
    remove_all(run.pending, met)
  end
  add_all(run.running, scores)
  return all_fit
end

local function take_run(queue)
  local count, priority, bytes = take_number(), take(), take_number()
  local lean = is_lean(queue)
  local updates = lean and updates_key(queue)
  return {
    queue = queue,
    lean = lean,
    jobs = lean and jobs_key(queue),
    read = 0,
    read_at_once = 1,
    updates = updates and redis.call('EXISTS', updates) == 1 and updates,
    pending = set_key(queue, priority, PENDING),
    running = set_key(queue, priority, IN_PROGRESS),
    prefix = job_key(queue, ''),
    bytes = bytes,
    ids = take_all(count),
    claims = take_all(count),
  }
end

-- Returns its result, and whether all of it fitted.
local function claim_run(run, answer)
  local in_order, bytes = are_first(run.pending, run.ids), run.bytes
  if bytes and in_order and bytes <= answer.left and bytes <= room and claim_known(run) then
    fits(answer, bytes)
    return #run.ids, true
  end
  local results = {}
  return results, claim_and_read(run, answer, in_order, results)
end

local claims = each_op(function(queue)
  local answer = { left = take_number(), at_least_one = take() == '1' }
  local results, all_fit = {}, room > 0 or not claimed_any
  for at = 1, take_number() do
    local run = take_run(queue)
    results[at] = 0
    if all_fit then
      results[at], all_fit = claim_run(run, answer)
    end
  end
  return results
end)

return { 'OK', acks, checkpoints, releases, enqueues, claims }
