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

local function held_by(queue, priority, id, claim)
  local job = held_claim(queue, priority, id)
  if job and (claim == nil or claim == job.claim) then
    return job
  end
  return nil
end

local function succeed(job, queue, priority, text)
  redis.call('ZREM', job.running, job.id)
  if text == '' then
    redis.call('HSET', job.key, 'ua', now_seconds, 'ra', job.run_after)
  else
    -- As PinLater does here: the text of an ack replaces what was there.
    local status = cut(text, status_chars)
    redis.call('HSET', job.key, 'ua', now_seconds, 'ra', job.run_after, 'cs', status)
  end
  redis.call('ZADD', set_key(queue, priority, SUCCEEDED), score_of(now, job.id), job.id)
end

local function each_ack(queue, end_attempt)
  local done, noop = 0, 0
  for _ = 1, take_number() do
    local count, priority, text = take_number(), take(), take()
    local delay, claim = take_number(), take_optional()
    for _ = 1, count do
      local id = take()
      local job = held_by(queue, priority, id, claim)
      if job then
        end_attempt(job, priority, text, delay)
        done = done + 1
      else
        noop = noop + 1
      end
    end
  end
  return done, noop
end

local acks = each_op(function(queue)
  local result = { 0, 0, 0 }
  local succeeded, not_succeeded = each_ack(queue, function(job, priority, text)
    succeed(job, queue, priority, text)
  end)
  local failed, not_failed = each_ack(queue, function(job, priority, text, delay)
    local retry_ms = math.min(now + delay, latest_ms)
    local status = text == '' and job.status or cut(text, status_chars)
    if fail_attempt(job, queue, priority, retry_ms, status, now) then
      requeue(result, priority, job.id, retry_ms)
    end
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
    -- It was evicted, perhaps not for the first time. No queue has given a million ids a second
    -- since the epoch.
    local began = number_in(redis.call('HGET', RECORD, 'start_ms'), 0, LATEST_ORDERED_MS) or 0
    redis.call('SET', counter, string.format('%.0f', math.max(now, began) * 1000))
  end
  local first = redis.call('INCRBY', counter, jobs) - jobs + 1
  local number = first
  for _ = 1, runs do
    local count, priority, run_after = take_number(), take(), take()
    local attempts, status = take(), take()
    local pending, run_after_ms = set_key(queue, priority, PENDING), tonumber(run_after)
    for _ = 1, count do
      local id = string.format('%.0f', number)
      redis.call(
        'HSET', job_key(queue, id), 'bd', take(), 'cs', status,
        'ca', now_seconds, 'ua', now_seconds, 'al', attempts, 'ar', attempts, 'ra', run_after
      )
      redis.call('ZADD', pending, score_of(run_after_ms, id), id)
      number = number + 1
    end
  end
  return first
end)

-- --- claims -----------------------------------------------------------------------------------
-- Of each op: how many runs. A run: how many, priority; then of each id, claim, '1' if its payload
-- is known. The result of a claim: 0 if the job is not PENDING; 1; or a table of body, attempts
-- allowed and remaining.

local function claim_job(queue, priority, pending, running)
  local id, claim, known = take(), take(), take() == '1'
  local score = redis.call('ZSCORE', pending, id)
  if not score then
    return 0
  end
  redis.call('ZREM', pending, id)
  local key = job_key(queue, id)
  local f
  if known then
    f = fields_of(key, 'ra')
  else
    f = fields_of(key, 'ra', 'bd', 'al', 'ar')
  end
  if not f then
    return 0
  elseif f[1] then
    redis.call('HSET', key, 'cd', claim)
  else
    redis.call('HSET', key, 'cd', claim, 'ra', ms_of(score))
  end
  redis.call('ZADD', running, score_of(now, id), id)
  if known then
    return 1
  end
  return { f[2] or '', f[3], f[4] }
end

local claims = each_op(function(queue)
  local result = {}
  for _ = 1, take_number() do
    local count, priority = take_number(), take()
    local pending = set_key(queue, priority, PENDING)
    local running = set_key(queue, priority, IN_PROGRESS)
    for _ = 1, count do
      result[#result + 1] = claim_job(queue, priority, pending, running)
    end
  end
  return result
end)

return { 'OK', acks, checkpoints, releases, enqueues, claims }
