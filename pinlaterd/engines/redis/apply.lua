-- One batch: acks, checkpoints, releases, enqueues, claims, in this order, each in its turn.
--
-- The batch is atomic. Redis runs a script alone, with nothing in between, and writes what it
-- changed to the append-only file as one transaction, of which a restart takes all or nothing. What
-- may be refused is refused by the script's first write (begin_write), before anything has changed;
-- the commands after it are such as cannot fail, unless a stranger put something else under our
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
  problem = damage(counter, 'string')
  if problem then
    return problem
  end
  local last = redis.call('GET', counter)
  if last and not (string.find(last, '^[0-9]+$') and number_in(last, 0, MOST_EXACT / 2)) then
    return { 'DAMAGED', counter, 'what is no id', 'the last id given' }
  end
end
local now, latest_ms, status_chars = take_number(), take_number(), take_number()
local now_seconds = seconds(now)

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
-- claim or none; then ids.

-- What holds a job for its move to another shard has to be named: whoever names no claim means an
-- attempt that ended before. See model.is_held_under.
local function is_held_under(held, given)
  if given == nil then
    return not held or string.sub(held, -5) ~= '-move'
  end
  return held == given
end

local function held_by(queue, priority, id, claim)
  local job = held_claim(queue, priority, id)
  if job and is_held_under(job.claim, claim) then
    return job
  end
  return nil
end

-- Returns how many did. What is the same for all is done once for all.
local function succeed(queue, priority, ids, text, claim)
  local running = set_key(queue, priority, IN_PROGRESS)
  local held = scores_by_id(running, ids)
  local ended, scores = {}, {}
  for _, id in ipairs(ids) do
    local key, score = job_key(queue, id), held[id]
    held[id] = nil -- given twice, it ends once
    local job = score and fields_of(key, 'cd', 'ra')
    if score and not job then
      redis.call('ZREM', running, id) -- evicted
    elseif job and is_held_under(job[1], claim) then
      -- A job of PinLater's gets the run-after that its score stood for, before the score goes.
      local changes = { 'ua', now_seconds }
      if not number_in(job[2], -LATEST_ORDERED_MS, LATEST_MS) then
        changes = { 'ua', now_seconds, 'ra', ms_of(score) }
      end
      if text ~= '' then
        -- As PinLater does here: the text of an ack replaces what was there.
        changes[#changes + 1], changes[#changes + 2] = 'cs', cut(text, status_chars)
      end
      redis.call('HSET', key, unpack(changes))
      ended[#ended + 1] = id
      scores[#scores + 1] = score_of(now, id)
      scores[#scores + 1] = id
    end
  end
  remove_all(running, ended)
  add_all(set_key(queue, priority, SUCCEEDED), scores)
  return #ended
end

-- Returns how many did; adds to `requeued` those that are PENDING again.
local function fail(queue, priority, ids, text, claim, delay, requeued)
  local retry_ms = math.min(now + delay, latest_ms)
  local ended = 0
  for _, id in ipairs(ids) do
    local job = held_by(queue, priority, id, claim)
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
    local delay, claim, ids = take_number(), take_optional(), {}
    for at = 1, count do
      ids[at] = take()
    end
    done = done + end_run(priority, ids, text, claim, delay)
    all = all + count
  end
  return done, all - done
end

local acks = each_op(function(queue)
  local result = { 0, 0, 0 }
  local succeeded, not_succeeded = each_run(function(priority, ids, text, claim)
    return succeed(queue, priority, ids, text, claim)
  end)
  local failed, not_failed = each_run(function(priority, ids, text, claim, delay)
    return fail(queue, priority, ids, text, claim, delay, result)
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
      redis.call('HSET', job.key, 'ra', run_after, 'ua', now_seconds)
      if body then
        redis.call('HSET', job.key, 'bd', body)
      end
      if attempts then
        redis.call('HSET', job.key, 'al', attempts, 'ar', attempts)
      end
      if text ~= '' then
        redis.call('HSET', job.key, 'cs', cut(text .. job.status, status_chars))
      end
      if to_pending then
        redis.call('HDEL', job.key, 'cd')
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
      redis.call('HDEL', job.key, 'cd')
      redis.call('ZREM', job.running, id)
      redis.call('ZADD', set_key(queue, priority, PENDING), score_of(job.run_after, id), id)
      requeue(result, priority, id, job.run_after)
    end
  end
  return result
end)

-- --- enqueues ---------------------------------------------------------------------------------
-- Of each op: how many jobs, how many runs. A run: how many, priority, run-after in ms, attempts,
-- status; then bodies. Its result: the id of the first job; the others follow.

local enqueues = each_op(function(queue)
  local jobs, runs = take_number(), take_number()
  if jobs == 0 then
    return 0
  end
  local counter = counter_key(queue)
  if redis.call('EXISTS', counter) == 0 then
    redis.call('SET', counter, unused_id(now)) -- it was evicted
  end
  local first = redis.call('INCRBY', counter, jobs) - jobs + 1
  local number = first
  for _ = 1, runs do
    local count, priority, run_after = take_number(), take(), take()
    local attempts, status = take(), take()
    local scores, run_after_ms = {}, tonumber(run_after)
    for _ = 1, count do
      local id = string.format('%.0f', number)
      redis.call(
        'HSET', job_key(queue, id), 'bd', take(), 'cs', status,
        'ca', now_seconds, 'ua', now_seconds, 'al', attempts, 'ar', attempts, 'ra', run_after
      )
      scores[#scores + 1] = score_of(run_after_ms, id)
      scores[#scores + 1] = id
      number = number + 1
    end
    add_all(set_key(queue, priority, PENDING), scores)
  end
  return first
end)

-- --- claims -----------------------------------------------------------------------------------
-- In front of the ops: most bytes of the batch, bytes of a job beside its body. Of each op: most
-- bytes, '1' if its first job counts as within them, how many runs. A run: how many, priority; then
-- of each id, claim, and the bytes of its body if its payload is known, or ''. The result of a
-- claim: 0 if the job is not PENDING; 1; or a table of body, attempts allowed and remaining. There
-- is none of the first that does not fit, and of those behind it in the op: they are left alone.

local room, job_bytes = take_number(), take_number()
local claimed_any = false

-- A job, as far as a claim needs it: ra, and with what the claim does not know already bd, al, ar.
-- nil if it was evicted.
local function job_to_claim(key, known)
  if known then
    return fields_of(key, 'ra')
  end
  return fields_of(key, 'ra', 'bd', 'al', 'ar')
end

-- Note the claim in the job; its result. `score`: that it has where it is PENDING.
local function claim_job(key, job, score, claim, known)
  if job[1] then
    redis.call('HSET', key, 'cd', claim)
  else
    redis.call('HSET', key, 'cd', claim, 'ra', ms_of(score))
  end
  if known then
    return 1
  end
  return { job[2] or '', job[3], job[4] }
end

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

-- Adds to `results`, up to the first job that does not fit; returns whether all did.
local function claim_run(queue, priority, answer, run, results)
  local pending, all_fit = set_key(queue, priority, PENDING), true
  local ready = scores_by_id(pending, run.ids)
  local met, scores = {}, {}
  for at, id in ipairs(run.ids) do
    local score, claimed, known = ready[id], 0, run.known[at]
    if score then
      local key = job_key(queue, id)
      local job = job_to_claim(key, known)
      if job and not fits(answer, (known or #(job[2] or '')) + job_bytes) then
        all_fit = false
        break
      end
      ready[id] = nil -- given twice, it is claimed once
      met[#met + 1] = id -- an evicted one goes, too
      if job then
        claimed = claim_job(key, job, score, run.claims[at], known)
        scores[#scores + 1] = score_of(now, id)
        scores[#scores + 1] = id
      end
    end
    results[#results + 1] = claimed
  end
  remove_all(pending, met)
  add_all(set_key(queue, priority, IN_PROGRESS), scores)
  return all_fit
end

local function take_run(count)
  local run = { ids = {}, claims = {}, known = {} }
  for at = 1, count do
    run.ids[at], run.claims[at], run.known[at] = take(), take(), take_number() or false
  end
  return run
end

local claims = each_op(function(queue)
  local answer = { left = take_number(), at_least_one = take() == '1' }
  local results, all_fit = {}, room > 0 or not claimed_any
  for _ = 1, take_number() do
    local count, priority = take_number(), take()
    local run = take_run(count)
    all_fit = all_fit and claim_run(queue, priority, answer, run, results)
  end
  return results
end)

return { 'OK', acks, checkpoints, releases, enqueues, claims }
