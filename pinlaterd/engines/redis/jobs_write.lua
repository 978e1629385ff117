-- What scripts share that end attempts or remove jobs. Follows common.lua.

local function cut(text, most_chars)
  if #text <= most_chars then
    return text
  end
  local chars = 0
  for at = 1, #text do
    local byte = string.byte(text, at)
    if byte < 128 or byte > 191 then -- the first byte of a character in UTF-8
      chars = chars + 1
      if chars > most_chars then
        return string.sub(text, 1, at - 1)
      end
    end
  end
  return text
end

-- A job that is IN_PROGRESS, or nil.
local function held_claim(queue, priority, id)
  local running = set_key(queue, priority, IN_PROGRESS)
  local score = redis.call('ZSCORE', running, id)
  if not score then
    return nil
  end
  local key = job_key(queue, id)
  local fields = fields_of(key, 'cd', 'ar', 'ra', 'cs')
  if not fields then
    redis.call('ZREM', running, id)
    return nil
  end
  return {
    id = id,
    key = key,
    running = running,
    claim = fields[1] or '',
    remaining = number_in(fields[2], 0, LARGEST_I32) or 1,
    run_after = number_in(fields[3], -LATEST_ORDERED_MS, LATEST_MS) or ms_of(score),
    status = fields[4] or '',
  }
end

-- PENDING with one attempt less, or FAILED with none; true if PENDING.
local function fail_attempt(job, queue, priority, retry_ms, status, now)
  redis.call('ZREM', job.running, job.id)
  if job.remaining > 1 then
    redis.call('HDEL', job.key, 'cd')
    redis.call('HSET', job.key, 'ar', job.remaining - 1, 'ra', retry_ms)
    redis.call('HSET', job.key, 'ua', seconds(now), 'cs', status)
    redis.call('ZADD', set_key(queue, priority, PENDING), score_of(retry_ms, job.id), job.id)
    return true
  end
  redis.call('HSET', job.key, 'ar', 0, 'ra', job.run_after)
  redis.call('HSET', job.key, 'ua', seconds(now), 'cs', status)
  redis.call('ZADD', set_key(queue, priority, FAILED), score_of(now, job.id), job.id)
  return false
end

local MOST_GONE_AT_ONCE = 10000

-- Give `visit` the first jobs of a set with scores from `least` to `most`, `limit` at most. It has to
-- remove what it is given. What is no job, or was evicted, is removed on the way, so many at once
-- and no more.
local function visit_first(set, queue, least, most, limit, visit)
  local visited, gone = 0, 0
  while visited < limit and gone < MOST_GONE_AT_ONCE do
    local ids = redis.call('ZRANGEBYSCORE', set, least, most, 'LIMIT', 0, limit - visited)
    if #ids == 0 then
      break
    end
    for _, id in ipairs(ids) do
      if forget_if_gone(set, queue, id) then
        gone = gone + 1
      else
        visit(id)
        visited = visited + 1
      end
    end
  end
  return visited
end
